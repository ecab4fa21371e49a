"""Small helpers that every stage may use. Nothing here imports a stage."""
