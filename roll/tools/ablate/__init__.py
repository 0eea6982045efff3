"""`roll ablate`: runs a grid of policy losses, ratios and seeds, and tabulates and plots the results."""
