"""``ml.from_torch``: writes at positions of any axes, against PyTorch over a generated family of index patterns."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from test_importing import Expressions, draw
from torch import nn

import mithril as ml

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

SIZE = 3  # of all axes: where sizes differ, a wrong order of axes is an error instead of a wrong value
ROW = torch.tensor([2, 0, 1])
MATRIX = torch.tensor([[0, 2, 1], [1, -1, 0]])
MASK = torch.tensor([True, False, True])
MASKS = torch.tensor([[True, False, False], [False, True, True], [False, True, False]])
# indices of one axis
CHOICES = (slice(None), ROW, MATRIX, MASK, slice(0, 2), 1)


def patterns():
    for pattern in product(range(len(CHOICES)), repeat=3):
        index = tuple(CHOICES[k] for k in pattern)
        counts = {tuple(i.shape) for i in index if isinstance(i, torch.Tensor) and i.dtype != torch.bool}
        masked = any(i is MASK for i in index)
        if any(isinstance(i, torch.Tensor) for i in index) and not (masked and counts):
            yield index
    pair = torch.tensor([2, 0])
    yield from [(MASKS,), (slice(None), MASKS), (MASKS, slice(0, 2))]
    yield from [(MASK, pair), (pair, slice(None), MASK), (slice(None), MASK, pair)]


def values_of(shape):
    """Return values for a written part of this shape: complete, of sizes 1, of fewer axes."""
    complete = draw(*shape, seed=5)
    return [complete, *(complete.select(axis, 0).unsqueeze(axis) for axis in range(len(shape))), complete[0]]


def cases():
    """Return each pattern with complete values, and with one of the smaller values in turn."""
    for k, index in enumerate(patterns()):
        values = values_of(torch.zeros(SIZE, SIZE, SIZE)[index].shape)
        yield index, values[0]
        yield index, values[1 + k % (len(values) - 1)]


def write(index, values):
    def function(x, y, i, m):
        z = x.clone()
        z[index] = values
        return z

    return function


def add(index, values):
    return lambda x, y, i, m: torch.ops.aten.index_put(x, index, values, accumulate=True)


def results(functions, inputs, **options):
    """Return the names, results of mithril and results of PyTorch."""
    module = Expressions(functions)
    expected = torch.utils._pytree.tree_leaves(module(*inputs))
    model = ml.from_torch(module, inputs, training=False, **options)
    compiled = ml.compile(model, "numpy", inference=True)
    actual = compiled.evaluate({n: x.numpy() for n, x in zip("xyim", inputs, strict=True) if n in model.inputs})
    return model.outputs, list(actual.values()), expected


def check(functions, inputs, **options):
    for name, result, theirs in zip(*results(functions, inputs, **options), strict=True):
        np.testing.assert_allclose(result, theirs.numpy(), rtol=1e-5, atol=1e-6, err_msg=name)
        assert str(result.dtype) == str(theirs.dtype).removeprefix("torch."), name


INPUTS = draw(SIZE, SIZE, SIZE), draw(SIZE, SIZE, seed=2), ROW, draw(SIZE, SIZE, SIZE, seed=3) > 0


def test_writes_of_all_patterns():
    check({f"case{k}": write(*case) for k, case in enumerate(cases())}, INPUTS)


def test_sums_of_all_patterns():
    def tensors_only(index):
        return tuple(None if isinstance(i, slice) else i for i in index)

    sums = [
        (tensors_only(index), values)
        for index, values in cases()
        if all(isinstance(i, torch.Tensor) or i == slice(None) for i in index)
    ]
    check({f"case{k}": add(*case) for k, case in enumerate(sums)}, INPUTS)


def cache(x, i, values):
    z = x.clone()
    z[:, i] = values
    return z


FORMS = {
    "variable": lambda x, y, i, m: cache(x, i, y),
    "variable_row": lambda x, y, i, m: cache(x, i, y[:, 0]),
    "variable_column": lambda x, y, i, m: cache(x, i, y[:, :1, None].expand(3, 3, 1)),
    "copied": lambda x, y, i, m: [x.index_copy(d, i, x.flip(0)) for d in (0, 1, -1)],
    "added": lambda x, y, i, m: [x.index_add(d, i.clamp(max=1), x.flip(0), alpha=2) for d in (0, 1, 2)],
    "filled": lambda x, y, i, m: [x.index_fill(d, i[:2], 7.0) for d in (0, 1, -1)],
    "filled_by_tensor": lambda x, y, i, m: x.index_fill(1, i[:2], y[0, 0]),
    "mask": lambda x, y, i, m: [x.masked_fill(m, y[0, 0]), x.index_put((m,), y[1, 1])],
    "mask_of_rows": lambda x, y, i, m: x.index_put((m[0, 0],), y),
    "mask_of_columns": lambda x, y, i, m: torch.ops.aten.index_put(x, (None, m[0, 0]), y[:1]),
    "mask_of_last": lambda x, y, i, m: torch.ops.aten.index_put(x, (None, m[0]), y[0, 0]),
    "mask_added": lambda x, y, i, m: torch.ops.aten.index_put(x, (None, m[0, 0]), y[:1], accumulate=True),
    "rank_0": lambda x, y, i, m: [y[0, 0].index_copy(0, i[1], y[1, 1]), y[0, 0].index_add(0, i[1], y[1, 1])],
    "scalar_values": lambda x, y, i, m: y[0].index_copy(0, i[0], y[1, 1]),
    "cast": lambda x, y, i, m: i.index_put((i[:1],), torch.tensor(5)),
    "unsafe": lambda x, y, i, m: torch.ops.aten._unsafe_index_put(x, (None, i), y),
    "folded": lambda x, y, i, m: torch.nn.functional.fold(x.reshape(1, 9, 3)[:, :8], (2, 4), 2),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms_of_writes(name):
    check({name: FORMS[name]}, INPUTS)


def test_cache_of_open_sizes():
    class Written(nn.Module):
        def forward(self, x, i, y):
            x = x.clone()
            x[:, :, i] = y
            return x

    def inputs(batch, length):
        return draw(batch, 2, 8, 8), torch.arange(length).flip(0), draw(batch, 2, length, 8, seed=1)

    shapes = {"x": {0: "batch"}, "i": {0: "length"}, "y": {0: "batch", 2: "length"}}
    model = ml.from_torch(Written(), inputs(3, 4), dynamic_shapes=shapes, training=False)
    compiled = ml.compile(model, "numpy", inference=True)
    for batch, length in ((3, 4), (2, 2), (8, 8)):
        x = inputs(batch, length)
        result = compiled.evaluate({n: t.numpy() for n, t in zip("xiy", x, strict=True)})
        np.testing.assert_allclose(result["output"], Written()(*x).numpy(), rtol=1e-6)
