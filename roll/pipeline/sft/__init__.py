"""Supervised fine-tuning on prompt and answer pairs, on the same training loop."""
