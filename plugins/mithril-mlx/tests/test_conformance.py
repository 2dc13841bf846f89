"""The MLX backend on the whole conformance kit."""

from mithril.backend.base import BuildOptions
from mithril_testing import BackendConformance


class TestMlx(BackendConformance):
    backend = "mlx"


class TestMlxInference(BackendConformance):
    """Attention by its kernel, which training on the CPU does without."""

    backend = "mlx"
    ops = ("attention",)

    @classmethod
    def options(cls):
        return BuildOptions(jit=False, inference=True)
