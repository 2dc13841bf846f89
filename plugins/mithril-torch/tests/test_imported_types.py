"""``ml.from_torch``: each node has the shape and dtype that PyTorch recorded, and all results are computed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_imported_writes import check
from test_importing import draw
from torch import nn

import mithril as ml
from mithril import ops
from mithril.graph import UnsupportedError

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

INPUTS = draw(2, 4, 7, 9), draw(2, 4, 6, seed=2), torch.tensor([2, 0, 1]), draw(3, 3) > 0
aten = torch.ops.aten
RESULTS = {
    "pool1": lambda x, y, i, m: F.max_pool1d(y, 2, return_indices=True),
    "pool2": lambda x, y, i, m: F.max_pool2d(x, 3, 2, 1, return_indices=True),
    "pool2_ceil": lambda x, y, i, m: F.max_pool2d(x[0], 2, ceil_mode=True, return_indices=True),
    "pool3": lambda x, y, i, m: F.max_pool3d(x, (1, 2, 3), return_indices=True),
    "adaptive1": lambda x, y, i, m: F.adaptive_max_pool1d(y, 4, return_indices=True),
    "adaptive2": lambda x, y, i, m: F.adaptive_max_pool2d(x, (3, 4), return_indices=True),
    "adaptive2_even": lambda x, y, i, m: F.adaptive_max_pool2d(x[0], (7, 3), return_indices=True),
    "adaptive3": lambda x, y, i, m: F.adaptive_max_pool3d(x, (2, 7, 2), return_indices=True),
    "unpool1": lambda x, y, i, m: F.max_unpool1d(*F.max_pool1d(y, 2, return_indices=True), 2),
    "unpool2": lambda x, y, i, m: F.max_unpool2d(*F.max_pool2d(x[..., :6, :8], 2, return_indices=True), 2),
    "unpool3": lambda x, y, i, m: F.max_unpool3d(*F.max_pool3d(x[..., :6, :8], 2, return_indices=True), 2),
    "layer_norm": lambda x, y, i, m: torch.native_layer_norm(x, (7, 9), None, None, 1e-5),
    "group_norm": lambda x, y, i, m: torch.native_group_norm(x, None, None, 2, 4, 63, 2, 1e-5),
    "batch_norm": lambda x, y, i, m: aten._native_batch_norm_legit.no_stats(x, None, None, True, 0.1, 1e-5),
    "batch_norm_running": lambda x, y, i, m: aten._native_batch_norm_legit_functional(
        x, None, None, y[0, :, 0], y[0, :, 1], True, 0.1, 1e-5
    ),
    "addbmm": lambda x, y, i, m: torch.addbmm(y[0], y, y.transpose(1, 2) @ y, beta=0.5, alpha=2.0),
    "addr": lambda x, y, i, m: torch.addr(y[0], y[0, :, 0], y[1, 1], beta=0.5, alpha=2.0),
}


@pytest.mark.parametrize("group", [list(RESULTS)[:8], list(RESULTS)[8:]])
def test_all_results_are_computed(group):
    check({name: RESULTS[name] for name in group}, INPUTS)


class Sine(nn.Module):
    def forward(self, x):
        return torch.special.bessel_j0(x) * 2


OTHER_TYPES = {
    "rank": lambda x: ops.sum(x, axis=(0,)),
    "size": lambda x: ops.concat(x, x, axis=0),
    "dtype": lambda x: ops.cast(x, dtype="float64"),
    "nothing": lambda x: None,
}


@pytest.mark.parametrize("name", OTHER_TYPES)
@pytest.mark.parametrize("shapes", [None, {"x": {0: "rows"}}])
def test_result_of_another_type_is_rejected(name, shapes):
    model = ml.from_torch(
        Sine(), draw(3, 4), dynamic_shapes=shapes, operators={"special_bessel_j0": OTHER_TYPES[name]}, training=False
    )
    with pytest.raises(UnsupportedError, match=r"special_bessel_j0 (is not computed|becomes .*in PyTorch)") as error:
        ml.compile(model, "numpy", inference=True)
    assert "test_imported_types.py" in str(error.value)


def test_open_sizes_in_another_order_are_rejected():
    class Transposed(nn.Module):
        def forward(self, x):
            return torch.special.bessel_j0(x)

    shapes = {"x": {0: "rows", 1: "columns"}}
    wrong = {"special_bessel_j0": lambda x: ops.transpose(x)}
    model = ml.from_torch(Transposed(), draw(3, 4), dynamic_shapes=shapes, operators=wrong, training=False)
    with pytest.raises(UnsupportedError, match=r"becomes float32\[columns, rows\]"):
        ml.compile(model, "numpy", inference=True)
    right = {"special_bessel_j0": lambda x: ops.sin(x)}
    model = ml.from_torch(Transposed(), draw(3, 4), dynamic_shapes=shapes, operators=right, training=False)
    for shape in ((5, 4), (2, 2)):  # also if the model is compiled for fixed sizes
        compiled = ml.compile(model, "numpy", inference=True, shapes={"x": list(shape)})
        np.testing.assert_allclose(compiled({"x": draw(*shape).numpy()})["output"], draw(*shape).sin(), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_embeddings_keep_the_dtype_of_the_module(dtype):
    module = nn.Sequential(nn.Embedding(4, 6), nn.Linear(6, 3)).to(getattr(torch, dtype))
    model = ml.from_torch(module, torch.ones(2, dtype=torch.int64), training=False)
    compiled = ml.compile(model, "numpy", inference=True)
    assert {str(x.dtype) for x in compiled.params.values()} == {dtype}
