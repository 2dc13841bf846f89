"""Training for mithril: a step is one graph, on every backend."""
