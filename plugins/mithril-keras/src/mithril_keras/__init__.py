"""Keras 3 archives: import of ``.keras`` files as trainable models for every backend, without Keras."""
