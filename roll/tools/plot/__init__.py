"""`roll plot`: the curves of a run as a picture. May import every other folder of the project but the other tools."""
