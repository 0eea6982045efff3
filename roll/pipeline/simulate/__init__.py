"""`roll simulate`: how long a step takes before it is tried, and which split and ratio suit the devices.

`calibration` reads a run, `model` turns a configuration and what is known of its speed into scenarios, `search` tries
splits and ratios, `text` shows them. The simulation itself is in roll/rollout.
"""
