"""`roll compare`: a batch that another framework has written, by the formulas of a recipe.

`read_verl`, `read_slime` and `read_trl` know a format each, `formulas` compares advantages, `batch_loss` has the loss.
"""
