"""Agents of the user, each episode in a process of its own that is killed at its deadline."""
