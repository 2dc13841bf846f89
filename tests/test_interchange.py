"""Arrays of one backend given to another: the same elements and dtype, in the same memory where that was asked."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import mithril as ml
from mithril import plugins

NAMES = [n for n in ("numpy", "jax", "torch", "mlx") if n in plugins.backends()]
DTYPES = ("float32", "float64", "float16", "bfloat16", "int8", "int32", "int64", "uint8", "bool")


@pytest.fixture(scope="module")
def backends():
    return {name: plugins.backend_class(name)() for name in NAMES}


def numbers(dtype):
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    return np.array([[0, 1, 2], [3, 4, 0]]).astype(kind)


@pytest.mark.parametrize("source", NAMES)
@pytest.mark.parametrize("target", [n for n in NAMES if n != "numpy"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_elements_and_dtypes_survive(backends, source, target, dtype):
    a, b = backends[source], backends[target]
    if ml.dtype(dtype) not in a.dtypes & b.dtypes:
        pytest.skip(f"no {dtype} there")
    array = a.array(numbers(dtype))
    for imported in (b.array(array), b.shared(array)):
        assert b.is_array(imported)
        roundtrip = b.to_numpy(imported)
        assert roundtrip.dtype == numbers(dtype).dtype
        np.testing.assert_array_equal(roundtrip, numbers(dtype))


def test_arrays_are_copied_unless_shared(backends):
    """Writes of PyTorch to a tensor must not change arrays that other frameworks treat as immutable."""
    if not {"torch", "jax"} <= set(backends):
        pytest.skip("needs jax and torch")
    import torch

    tensor = torch.zeros(1024)
    imported = backends["jax"].array(tensor)
    tensor += 1
    assert float(imported.sum()) == 0
    array = backends["jax"].ones((1024,))
    backends["torch"].array(array).zero_()
    assert float(array.sum()) == 1024
    assert backends["torch"].shared(array).data_ptr() == array.unsafe_buffer_pointer()
    assert backends["jax"].shared(tensor).unsafe_buffer_pointer() == tensor.data_ptr()


def test_numpy_views_are_not_written_to(backends):
    if "mlx" not in backends:
        pytest.skip("needs mlx")
    view = backends["mlx"].to_numpy(backends["mlx"].ones((3,)))
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 2


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [10, 1 << 22])
def test_later_writes_to_the_source_have_no_effect(backends, name, size):
    if name == "numpy":
        pytest.skip("NumPy's arrays are the user's own")
    for offset in (0, 1):
        source = np.zeros(size + 1, np.float32)[offset : size + offset]
        imported = backends[name].array(source)
        source[:] = 1
        assert float(backends[name].to_numpy(imported).sum()) == 0
