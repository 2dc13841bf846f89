"""Subgraphs that PyTorch runs as one kernel."""
