"""`roll show`: prints the samples of a training step."""
