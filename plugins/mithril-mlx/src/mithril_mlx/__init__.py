"""The MLX backend of mithril, for Apple silicon, CUDA and the CPU."""
