"""A configuration before it gets its machines: `rehearse` runs it in miniature, `simulate` predicts its speed.

Everything here may import the rest of `roll`; nothing but the command line (`roll/cli.py`) imports it.
"""
