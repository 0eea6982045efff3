"""What is checked and shown of a configuration before a process starts."""
