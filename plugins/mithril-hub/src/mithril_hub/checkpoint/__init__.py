"""Files of pretrained models: folders, tensors, configuration."""
