"""The transformer: its config, its code, and the road to and from Hugging Face folders."""
