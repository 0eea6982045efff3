"""Built-in rewards, the sandbox of programs, and the pool of processes that runs reward functions and can kill them.

`roll/pipeline/kinds/scorer.py` uses them: it adds the scores of the rewards of a sample.

Imports `roll.configs` and `roll.datasets.prompts`. torch is not imported, so that the replacement of a killed process
starts quickly.
"""
