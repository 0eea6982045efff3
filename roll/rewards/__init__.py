"""Built-in rewards, and how a reward function is called.

`roll/pipeline/kinds/scorer.py` uses them: it adds the scores of the rewards of a sample.

Imports `roll.configs` and `roll.datasets.prompts`. torch is not imported, so that the replacement of a killed process
starts quickly.
"""
