"""Indices of window maxima are computed without a gather, for which XLA would store the elements of all windows."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import mithril as ml
from mithril.graph import Builder, evaluate
from mithril_jax.backend import TPU_TABLES


def test_positions_of_maxima_need_no_gather():
    with Builder() as b:
        x = b.input("x", (2, 8, 32, 32))
        positions = ml.ops.max_pool_positions(x, kernel=(3, 3), stride=(2, 2), padding=((1, 1), (1, 1)))
    executable = ml.JaxBackend().build(b.build({"at": positions}))
    program = jax.jit(lambda image: executable({}, {"x": image})).lower(jax.ShapeDtypeStruct((2, 8, 32, 32), "float32"))
    assert "stablehlo.gather" not in program.as_text()


@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_wide_windows_are_one_reduction(dtype):
    """Check values with ties, nan and windows of infinities; a slice per element took minutes to compile."""
    x = np.random.default_rng(0).integers(-3, 3, (1, 2, 40, 40)).astype(dtype)
    if dtype == "float32":
        x[0, 0, 3, 3], x[0, 1, :20, :20] = np.nan, -np.inf
    with Builder("g") as b:
        operand = b.input("x", x.shape, dtype)
        y = ml.ops.max_pool_positions(operand, kernel=(24, 24), stride=(2, 3), padding=((12, 12), (1, 0)))
    graph = b.build({"y": y})
    compiled = ml.compile(graph, "jax")
    assert compiled.source.count("lax.reduce_window") == 1
    assert "window_parts" not in compiled.source
    result = compiled.evaluate({}, {"x": x})["y"]
    np.testing.assert_array_equal(result, evaluate(graph, {"x": x})["y"])


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation"),
    [
        ((2, 2), (2, 2), ((0, 0), (0, 0)), (1, 1)),
        ((3, 2), (2, 1), ((1, 2), (0, 1)), (2, 1)),
        ((3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1)),
        ((2, 2), (3, 3), ((0, 0), (0, 0)), (1, 1)),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "tpu"])
def test_gradients_of_maxima_scatter_nothing(kernel, stride, padding, dilation, device, monkeypatch):
    """Devices could not split a scatter along the batch; ties, nan and windows of infinities as in the reference."""
    if device == "tpu":  # its rows, on this machine
        monkeypatch.setattr(ml.JaxBackend, "base_table", lambda self, semantics: TPU_TABLES[semantics])
    x = np.random.default_rng(0).integers(-2, 3, (2, 2, 9, 8)).astype(np.float32)
    x[0, 0, 1, 1], x[0, 1, :4, :4] = np.nan, -np.inf
    attributes = {"kernel": kernel, "stride": stride, "padding": padding, "dilation": dilation}
    with Builder("g") as b:
        operand = b.input("x", x.shape)
        y = ml.ops.max_pool(operand, **attributes)
        cotangent = b.input("g", y.shape)
        gradient = ml.ops.max_pool_grad(cotangent, operand, **attributes)
    graph = b.build({"dx": gradient})
    inputs = {"x": x, "g": np.random.default_rng(1).standard_normal(y.shape, np.float32)}
    compiled = ml.compile(graph, "jax")
    np.testing.assert_allclose(compiled.evaluate({}, inputs)["dx"], evaluate(graph, inputs)["dx"], rtol=1e-6, atol=1e-6)
    program = jax.jit(compiled.programs[0].executable.call).lower({}, inputs)
    assert "scatter" not in program.as_text()
    assert ("stack" in compiled.source) == (device == "cpu")  # the elements of all windows at the same time
