"""Augmentation of images as layers of the training step."""
