"""The guards of a run: they find spikes and drops, decide what to do, and write a page that explains it.

Everything here is plain logic on numbers from the loop, one step late and off the hot path: no torch, no clock, no
random numbers. The whole state is JSON, so a resumed run decides like one that was not interrupted.

    detector     loss and gradient norm, step by step: spikes and drops; what a guard reports (`GuardFinding`)
    policy       findings -> what the loop does: continue, skip, roll back, stop
    ledger       which data is skipped
    watch        all of it as one object with one state
    documents    the rows of a step and their documents, as text
    advice       which settings to change, where the data is not the cause
    incident_page  an incident as HTML and as text
    incident     collects what a page shows, and writes pages in a background thread
"""
