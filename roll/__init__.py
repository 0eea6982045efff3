"""Post-training of language models: Megatron-Core trains, SGLang generates, Ray connects them."""

__version__ = "0.1.0"
