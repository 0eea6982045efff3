"""`roll serve`: Tinker's HTTP API on the verbs of `roll.open`; only the command line imports it.

Pure but for `server.py`, which serves HTTP, and `command.py`, which opens the engines.
"""
