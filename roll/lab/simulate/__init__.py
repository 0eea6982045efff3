"""`roll simulate`: predicts step time, idle time and staleness, and searches for a better split of the devices."""
