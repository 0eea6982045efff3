"""Rule rewards and the pool of killable processes that runs them.

Imports `roll.configs` and never torch, so that a replacement for a killed process starts quickly.
"""
