"""Declarations of keys (`schema`), errors, the terminal, the event log, and the redaction of secrets.

Imports nothing else of the package.
"""
