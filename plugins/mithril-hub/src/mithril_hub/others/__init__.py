"""Types of models that mithril has no layers for: modules of transformers, imported from PyTorch."""
