"""The training loop, once; `rlvr` and `sft` supply what differs: where samples come from and how they are learned.

May import every folder of the project but `cli`.
"""
