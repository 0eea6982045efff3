"""Models and data by name: `names`, their files on a hub (`fetch`, `find`), splits of datasets, generated data.

Imports only `roll.base`. huggingface_hub is imported when something is looked up, modelscope when it is asked for;
neither if all is on disk.
"""
