"""Model families: one file has everything that the project knows about one.

To add a family, write a file in `known/` with a `ModelFamily` called FAMILY, as in `known/qwen3.py`.
A family outside this package calls `register_family` in a module that `custom_modules` of the configuration or an entry
point of the group `roll_modules` names. A new kind of layer also needs its modules in `roll/models/local_spec.py`.

`family` says what a family is, `weights` and `layouts` what a weight is, `decoder` is what dense decoders share,
`hf_config` checks a config.json and `shape` holds its numbers. Configurations read them, so no file here imports torch
when it is imported, and of this package only `roll.base` is imported.
"""
