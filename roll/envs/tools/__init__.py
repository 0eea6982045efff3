"""Tools that the model may call in an environment, declared in YAML; they run in the process of the environment."""
