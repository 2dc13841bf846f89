"""The JAX backend of mithril: generated JAX code, compiled by XLA."""
