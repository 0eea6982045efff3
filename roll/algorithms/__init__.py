"""Losses, advantages, KL estimators and off-policy corrections of a training step, as pure functions of tensors.

Start at `losses` (the loss of one micro-batch) and `advantages` (those of a batch). A value of `pg_variant` is a file
of `policy_loss`, a value of `adv_estimator` one of `estimators`; `aggregation` has the sums and means they share.
Imports torch and `roll.base` only; options are read without torch (`lazy_torch`). Shapes: B samples (b in a
micro-batch), T tokens with right padding; the log-prob of token t is at index t.
"""
