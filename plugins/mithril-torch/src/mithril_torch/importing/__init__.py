"""``ml.from_torch``: PyTorch modules as models, through ``torch.export`` and one function per ATen operator."""
