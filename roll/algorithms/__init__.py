"""Losses, advantages, KL estimators and off-policy corrections of a training step, as pure functions of tensors.

Start at `losses` (the loss of one micro-batch) and `policy_loss` (the value of `pg_variant`); `advantages` calls the
estimators of `adv_estimators` and `turn_advantages`, `correction` is the off-policy correction, `aggregation` has the
sums and means they share. Imports torch and
`roll.base` only; options are read without torch (`lazy_torch`). Shapes: B samples (b in a micro-batch), T tokens with
right padding; the log-prob of token t is at index t. The formulas are listed in docs/algorithms.md.
"""
