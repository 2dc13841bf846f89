"""The PyTorch backend of mithril: generated PyTorch code, eager or through torch.compile."""
