"""How trained weights reach the engines: what goes in which bucket, who sends, and one transaction around it.

`plan` and `transaction` are plain Python; `groups` and `sender` run in training ranks, `publisher` in the driver. The
receiving side is the engine's strategy.
"""
