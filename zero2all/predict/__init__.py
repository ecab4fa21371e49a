"""What a run of a config will take: memory, time, the fastest layout. Above the trainer, whose own choices it asks."""
