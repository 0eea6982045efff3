"""Benchmarks: each module measures one figure, mostly against a baseline in the same run, and checks its target.

`python -m benchmarks.NAME --json FILE` runs one, `python -m benchmarks --json-dir DIR` runs all of them.
"""
