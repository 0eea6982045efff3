"""Post-training of language models: Megatron-Core learns, SGLang generates, Ray holds them together."""

__version__ = "0.1.0"
