"""Generation of Python source from graphs, shared by the numpy, jax, torch and mlx backends."""
