"""`roll rehearse`: runs a recipe in miniature on this CPU, through the real engines."""
