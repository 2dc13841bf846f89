"""Engines: a training step compiled for one backend, and its arrays."""
