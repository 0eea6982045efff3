"""What a run is: dataclasses, YAML loading, cross-field rules and the plan of a run.

Imports nothing but the standard library and the YAML stack, so that `roll plan` works on a machine without torch.
A file for agents is the exception: its environments are made once, to check their options, by `roll.envs`.
"""
