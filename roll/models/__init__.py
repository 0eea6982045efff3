"""Builds Megatron models from HF model folders and loads their weights.

`families` has what is known about each family: its config.json, and how its weights are named and split over ranks;
`factory` builds the model, from Transformer Engine's spec or from `local_spec`, whose operators are in `operators`;
`hf_import` loads weights; `fused_linear_logprobs` computes log-probs from hidden states. May import `roll.configs`,
`roll.platforms`, torch, safetensors and Megatron-Core; `families` comes before `roll.configs` and imports none of them.
"""
