"""Runs untrusted Python programs: a fork server in namespaces of its own, a new process for each program.

Only the standard library is imported here, and nothing of this project outside of this folder, because the fork server
starts without the rest.
"""
