"""Declarations of keys (`schema`), errors, the terminal, the event log, modules of the user, redaction of secrets.

Imports nothing else of the package.
"""
