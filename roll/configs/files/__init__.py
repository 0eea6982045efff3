"""Checks of the folders and files that a configuration names, before a process starts."""
