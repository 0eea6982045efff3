"""The configuration of a run: dataclasses of keys, loading, rules between keys, and the plan of a run.

`pipeline`, `agentic`, `roles`, `policy` and `asynchronous` declare the keys; `load` reads a file, with `compat` for the
spellings of other frameworks; `rules` checks it; `plan` and `memory` predict what it needs.

Imports only the standard library, the YAML stack and rich, so that `roll plan` works without torch. For agents, `rules`
imports `roll.envs` by name to check the options of environments.
"""
