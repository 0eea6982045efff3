"""Models and datasets by name: `names` and what they mean, `fetch`, `splits` of datasets, and `inputs` of a run.

huggingface_hub is imported when something is looked up, modelscope when it is asked for; neither if all is on disk.
"""
