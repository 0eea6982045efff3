"""The pipelines: one training loop, rollouter and learner, and what RLVR, agents and SFT add to them.

A run starts in `run.py`, and `training_loop.py` drives it. `rollouter.py` submits prompts and buffers samples, which
`rlvr/rlvr_worker.py` or `agentic/agentic_worker.py` generate; `rollout_batch.py` makes tensors of them, and `learner.py`
an update of the weights.

May import every folder of the project but `cli`.
"""
