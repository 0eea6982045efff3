"""Generation policy: what is asked of the engines, what comes back, and who may ask for more.

Plain Python: imports no ray, torch, sglang or megatron.
"""
