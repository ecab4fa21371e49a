"""Token shards on disk, the order in which a run reads them, and the loader that hands them to the trainer."""
