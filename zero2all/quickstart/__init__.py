"""The quickstart: a small world to learn, and a model trained on it in a few minutes."""
