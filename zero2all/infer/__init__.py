"""Running a trained model: loading it, and one engine for generation and scoring."""
