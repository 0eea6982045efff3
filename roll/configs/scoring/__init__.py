"""Keys and checks of rewards, of judges and of the models that score."""
