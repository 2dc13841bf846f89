"""The CUDA backend of mithril."""
