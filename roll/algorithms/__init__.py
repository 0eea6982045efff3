"""Losses, advantages, KL estimators and off-policy corrections of a training step, as pure functions of tensors.

Start at `losses` (the loss of one micro-batch) and `policy_losses` (the value of `pg_variant`); `advantages` and
`turn_advantages` hold the estimators, `correction` the off-policy correction, `aggregation` the sums and means they
share. Imports torch and `roll.configs` only. Shapes: B samples (b in a micro-batch), T tokens with right padding; the
log-prob of token t is at index t. The formulas are listed in docs/algorithms.md.
"""
