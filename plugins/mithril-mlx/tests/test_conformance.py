"""The MLX backend on the whole conformance kit."""

from mithril.backend.base import BuildOptions
from mithril_testing import BackendConformance

# factorizations by LAPACK
ON_HOST = frozenset({"cholesky", "eigh", "qr", "slogdet", "solve", "svd", "triangular_solve"})


class TestMlx(BackendConformance):
    backend = "mlx"
    on_host = ON_HOST


class TestMlxInference(BackendConformance):
    """Attention by its kernel, which training on the CPU does without."""

    backend = "mlx"
    ops = ("attention",)

    @classmethod
    def options(cls):
        return BuildOptions(jit=False, inference=True)
