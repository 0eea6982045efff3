"""The pipelines: one training loop, rollouter and learner, and what RLVR, agents, SFT and preferences add to them.

A run starts in `run.py`, and `training_loop.py` drives it. `rollouter.py` submits prompts and buffers the samples that
`rlvr_pipeline.py` or `agentic/agentic_worker.py` generates; `rollout_batch.py` turns them into tensors, and
`learner.py` these into an update of the weights; what learners have in common is in `actor_learner.py`.

May import every folder of the project but `cli`.
"""
