"""The JAX backend on the whole conformance kit."""

from mithril.testing import BackendConformance


class TestJax(BackendConformance):
    backend = "jax"
