"""Python source from a graph: what the numpy, jax, torch and mlx backends share."""
