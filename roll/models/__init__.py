"""From a HF model folder to a Megatron model and back.

`hf_config` reads config.json, `families` declares which HF tensor is which Megatron parameter, `layouts` says how a
tensor is cut over tensor-parallel ranks, `factory` builds the model, `hf_import` and `hf_export` move weights. May
import `roll.platforms`, torch, safetensors and Megatron-Core; only `hf_config` is free of all of them.
"""
