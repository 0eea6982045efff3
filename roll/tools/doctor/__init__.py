"""`roll doctor`: measures the devices and links of a run, and names the nodes that are slow."""
