"""What watches a run: spikes and drops, what is done about them, bad shards, and the page that explains.

Everything here is plain logic on numbers the loop hands over, one step late and off the hot path: no torch, no clock,
no random numbers. The whole state is JSON, so a resumed run decides as the run that was not interrupted.

    findings     what a watcher reports
    detector     loss and gradient norm, step by step: spikes and drops
    policy       findings -> what the loop does: go on, skip, roll back, stop
    ledger       which data is skipped, for ever
    rows         which sample, shard and documents stand in the rows of a step
    levels       what was usual lately in each channel and source
    shards       loss per shard, over the whole run: poisoned and trivially easy ones
    repeats      shards that repeat another one, from their document lengths
    quarantine   shards whose samples no longer count
    watch        all of it as one object with one state
    documents    the documents of a step, as text
    advice       what follows for the settings, where the data is not to blame
    incident     everything the page shows, as JSON
    page         the same as HTML and as text
    writer       writes pages in a thread of its own
"""
