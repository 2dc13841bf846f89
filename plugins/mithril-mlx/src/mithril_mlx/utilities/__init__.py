"""Utilities of the MLX guide: caches, tuners, profilers, and fusion by patterns."""
