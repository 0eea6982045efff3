"""Rollout without engines: trajectories and groups, how far generation may run ahead, balancing, filters and metrics.

Plain Python: imports no ray, torch, sglang or megatron.
"""
