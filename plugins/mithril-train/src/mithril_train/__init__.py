"""Training for mithril: one graph per training step, on every backend."""
