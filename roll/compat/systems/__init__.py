"""What each system writes differently: its tables of keys, and functions for what is arithmetic."""
