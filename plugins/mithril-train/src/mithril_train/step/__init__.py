"""The training step as one graph."""
