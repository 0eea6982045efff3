"""The kinds of runs, one file each, and the models that score samples."""
