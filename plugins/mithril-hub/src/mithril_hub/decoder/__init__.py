"""Decoder language models, driven by one configuration."""
