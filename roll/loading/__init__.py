"""Reads a YAML file and overrides as a checked configuration. May import `roll.configs` and `roll.compat`."""
