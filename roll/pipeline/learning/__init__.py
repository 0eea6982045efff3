"""One step of learning: a batch of samples becomes losses, updated weights and metrics."""
