"""The processes of a run, how they communicate, and how a model is spread over them."""
