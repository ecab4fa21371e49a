"""What keeps a run alive. In the processes of a run: heartbeat, and slots (checkpoints in memory). Outside of them:
supervisor, with restarts (and requests to stop), diagnosis (what is known about a failure) and failure_page (where that
is written)."""
