"""From files to tensors: prompts, chat templates, sampling order, collation, micro-batches and synthetic problems.

May import `roll.configs` and `roll.algorithms`; only `collate` imports torch.
"""
