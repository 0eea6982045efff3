"""The run: `run.py` has all of it on one screen.

`launch.py` starts it, again after a process died; `progress.py` keeps its counters and checkpoints. `kinds/` has what
RLVR, agents, SFT and preferences add; `learning/learner.py` turns a batch into an update of the weights.

May import every folder of the project but `tools` and `cli`.
"""
