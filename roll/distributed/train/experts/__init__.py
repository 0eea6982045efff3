"""What a trained mixture of experts adds: which experts compute a token, and how the work is spread over them."""
