"""The mathematics of a training step: losses, advantages, KL, aggregation and off-policy diagnostics.

Pure functions of tensors; imports torch and `roll.configs`, nothing else of the project. Shapes: B samples, T padded
tokens, right padded; the log-prob of token t is stored at index t. See docs/algorithms.md for the formulas.
"""
