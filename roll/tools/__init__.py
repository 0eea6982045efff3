"""Commands around a run: predict its speed, compare many runs, show its samples.

`simulate`, `ablate` and `show` each have a `command` module with the options of `roll simulate`, `roll ablate` and
`roll show`. Everything here may import the rest of `roll`; nothing but the command line (`roll/cli.py`) imports it.
"""
