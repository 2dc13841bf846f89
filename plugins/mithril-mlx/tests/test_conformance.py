"""The MLX backend on the whole conformance kit."""

from mithril.testing import BackendConformance


class TestMlx(BackendConformance):
    backend = "mlx"
