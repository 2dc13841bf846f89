"""The portable meaning where PyTorch's own kernels differ from it."""

import numpy as np
import pytest

from mithril.graph import Builder
from mithril.graph.errors import UnsupportedError
from mithril.graph.registry import operations
from mithril_testing.levels import REFERENCE, Levels
from mithril_torch.backend import TorchBackend

OPS = operations()
NAN, INF = float("nan"), float("inf")
X = np.array([NAN, 1.0, -1.0, 0.0, -0.0, 2.0, INF, -INF, 3e38], np.float32)


def same_as_reference(write, **arrays):
    """Compare values and gradients at levels none and medium."""
    with Builder() as builder:
        y = write(*[builder.input(name, a.shape, a.dtype.name) for name, a in arrays.items()])
    programs = Levels(builder.build({"y": y}), TorchBackend())
    for level in ("none", "medium"):
        for gradient in [False, True] if programs.wrt else [False]:
            with np.errstate(all="ignore"):
                assert programs.differences(level, arrays, gradient=gradient, base=REFERENCE) == []


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_comparisons_with_nan_are_false(sign):
    """Leave such a choice to torch.where: the kernel of the gradient of relu lets cotangents through where nan is."""
    same_as_reference(
        lambda x, y: OPS["where"](OPS["greater"](x, 0.0), y, 0.0), x=sign * X, y=np.arange(1, 10, dtype=np.float32)
    )


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("exponent", [0.5, 2.0, 1.5])
def test_powers(exponent):
    same_as_reference(lambda x: x**exponent, x=X[:8])


WORDS = np.array([[0, 1, 2**31, 2**32 - 1], [5, 2**32 - 2, 7, 3]], np.uint32)
AT = np.array([[1, 0], [0, 3]], np.int32)


@pytest.mark.parametrize(
    "write",
    [
        lambda x: OPS["scatter_nd_add"](x, Builder.current().constant(AT), x[0, :2]),
        lambda x: OPS["dynamic_update_slice"](x, x[:1, :2], Builder.current().constant(np.array([1, 1], np.int32))),
        lambda x: OPS["max_pool"](OPS["reshape"](x, shape=(1, 1, 2, 4)), kernel=(2, 2)),
        lambda x: OPS["max_pool_positions"](OPS["reshape"](x, shape=(1, 1, 2, 4)), kernel=(2, 2)),
    ],
    ids=["scatter_nd_add", "dynamic_update_slice", "max_pool", "max_pool_positions"],
)
def test_unsigned_words(write):
    same_as_reference(write, x=WORDS)


@pytest.mark.parametrize("dtype", ["int32", "uint32", "int64"])
def test_integer_convolutions_are_refused(dtype):
    with Builder() as builder:
        x = builder.input("x", (1, 1, 3, 3), dtype)
        graph = builder.build({"y": OPS["conv"](x, x)})
    with pytest.raises(UnsupportedError, match=f"backend 'torch' does not support 'conv' of {dtype}"):
        TorchBackend().build(graph)
