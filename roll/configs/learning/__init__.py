"""Samples and forward passes of an update, and the rounding of its log-probs."""
