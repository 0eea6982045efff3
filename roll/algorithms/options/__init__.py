"""Keys of losses and estimators with their checks; imports neither torch nor `roll.configs`."""
