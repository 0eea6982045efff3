"""Commands around a run: measure its machines, compare many, show samples, draw curves.

Each has a module with the options of its command, such as `roll show`. Everything here may import the rest of `roll`
but `roll/lab`; nothing but the command line (`roll/cli.py`) and `roll/lab` imports it.
"""
