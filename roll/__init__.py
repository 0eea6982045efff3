"""Post-training of language models: Megatron-Core learns, SGLang generates, Ray runs the processes."""

__version__ = "0.1.0"
