"""Rollout without engines: prompts in, batches of samples out; how far generation may run ahead; accounting; balancing.

Imports no ray, sglang or megatron.
"""
