"""Megatron-Core: the worker of a training rank, its model, optimizer, checkpoints, and the sending of weights."""
