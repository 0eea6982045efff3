"""Runs from Python: `roll.train`, and `roll.open` for a training loop of the caller."""
