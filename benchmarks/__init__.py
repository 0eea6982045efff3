"""One module per question: each measures a baseline and this project in one run, and checks the ratio.

`python -m benchmarks.NAME --json FILE` runs one, `python -m benchmarks --json-dir DIR` all of them.
"""
