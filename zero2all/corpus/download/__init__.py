"""`z2a corpus download`: files of a Hugging Face-style hub."""
