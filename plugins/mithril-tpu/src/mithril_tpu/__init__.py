"""The TPU hardware target of mithril, and many devices through the JAX backend."""
