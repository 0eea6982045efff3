"""Builds Megatron models from HF model folders and maps their weights.

`hf_config` reads config.json; `weight_mapping` maps HF tensors to Megatron parameters and splits them over ranks;
`factory` builds the model, from Transformer Engine's spec or from `local_spec`, whose operators are in `operators`;
`hf_import` loads weights; `fused_linear_logprobs` computes log-probs from hidden states. `FAMILIES` of
`roll/configs/model_config.py` says how a model family is added. May import `roll.configs`, `roll.platforms`, torch,
safetensors and Megatron-Core; `hf_config` imports none of the last three.
"""
