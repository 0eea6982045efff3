"""The models: their families, their weights in files, and operators of Megatron-Core.

`families` has what is known about each family: its config.json, and how its weights are named and split over ranks;
`local_spec` has the layers where Transformer Engine is missing, of `operators`; `hf_import` loads weights;
`fused_linear_logprobs` computes log-probs from hidden states. `families` comes before `roll.configs`, and nothing here
imports it.
"""
