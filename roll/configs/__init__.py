"""The configuration of a run: the keys of each subject with their checks.

A file declares the keys of a subject and yields what is wrong with them; `check` puts the subjects together.
`roll.loading` reads a file. Imports only the standard library.
"""
