"""The run: its start, its steps, its checkpoints, its restarts and its end.

A run starts in `run.py`, and `training_loop.py` drives it. `kinds/` has what RLVR, agents, SFT and preferences add;
`learning/learner.py` turns a batch into an update of the weights.

May import every folder of the project but `tools` and `cli`.
"""
