"""Runs from Python: `roll.train`."""
