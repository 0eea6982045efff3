"""Checkpoints of Megatron roles, readable at every layout and without running code that their files name."""
