"""The gateway's processes: each serves a share of the sessions, and is replaced when it dies."""
