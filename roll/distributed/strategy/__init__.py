"""The engines: a Megatron-Core model that computes log-probs and is trained, and an SGLang engine that generates."""
