"""Calls between processes, through Ray or a socket, and their errors."""
