"""The engines behind small interfaces: Megatron-Core trains and infers log-probs, SGLang generates."""
