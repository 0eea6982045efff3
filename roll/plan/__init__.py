"""What is checked and shown of a configuration before a process starts; imports neither torch nor Ray."""
