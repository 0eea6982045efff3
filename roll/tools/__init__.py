"""Commands around a run: try it in miniature, measure its machines, predict its speed, compare many, show samples.

Each folder has a `command` module with the options of its command, such as `roll simulate`. Everything here may
import the rest of `roll`; nothing but the command line (`roll/cli.py`) imports it.
"""
