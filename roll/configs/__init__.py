"""The configuration of a run: the keys of each subject with their checks, and loading.

A file declares the keys of a subject and yields what is wrong with them; `check` puts the subjects together. `load`
reads a file, with `compat` for the spellings of other frameworks. Imports only the standard library and the YAML stack.
"""
