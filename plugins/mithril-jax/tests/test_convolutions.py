"""Kernels larger than their images, which are products here: XLA's convolutions of them are slow by orders."""

from __future__ import annotations

import numpy as np
import pytest

import mithril as ml
from mithril import ops
from mithril.derivatives import gradients
from mithril.graph import Builder
from mithril.graph.evaluation import evaluate

CASES = [
    ((2, 4, 2, 2), (6, 4, 3, 3), {"stride": (1, 1), "padding": ((1, 1), (1, 1))}),
    ((2, 4, 1, 2), (6, 2, 3, 3), {"stride": (1, 2), "padding": ((1, 2), (2, 1)), "groups": 2}),
    ((1, 3, 2, 3), (3, 1, 3, 2), {"stride": (2, 1), "padding": ((2, 3), (1, 1)), "dilation": (1, 2), "groups": 3}),
    ((3, 2, 2), (4, 2, 4), {"stride": (1,), "padding": ((2, 1),)}),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("image", "kernel", "settings"), CASES)
def test_kernels_larger_than_images(image, kernel, settings, dtype):
    with Builder() as b:
        x, w = b.input("x", image, dtype), b.input("w", kernel, dtype)
        y = ops.conv(x, w, **settings)
    graph = gradients(b.build({"y": y}), ["y"], ["x", "w"])
    rng = np.random.default_rng(0)
    arrays = {i.name: rng.normal(size=i.type.shape).astype(i.type.dtype.numpy) for i in graph.arguments}
    backend = ml.JaxBackend()
    executable = backend.build(graph)
    assert "conv_general_dilated" not in executable.source
    result = executable({}, {n: backend.array(a) for n, a in arrays.items()})
    expected = evaluate(graph, arrays)
    allowed = 1e-5 if dtype == "float32" else 3e-2
    for name, array in expected.items():
        error = np.abs(backend.to_numpy(result[name]).astype("f") - array.astype("f")).max()
        assert error <= allowed * np.abs(array.astype("f")).max(), name


MISCOMPILED = [  # cotangent, kernel, image and settings of gradients with respect to images
    ((4, 1, 3, 1), (1, 2, 2, 3), (4, 2, 4, 4), {"stride": (2, 2), "padding": ((1, 1), (1, 0)), "dilation": (1, 2)}),
    ((4, 3, 2, 4), (3, 2, 3, 2), (4, 2, 6, 6), {"stride": (3, 2), "padding": ((0, 2), (1, 2)), "dilation": (1, 1)}),
    ((4, 3, 6, 4), (3, 2, 2, 2), (4, 2, 5, 3), {"stride": (1, 1), "padding": ((2, 0), (1, 1)), "dilation": (1, 1)}),
]


@pytest.mark.parametrize(("cotangent", "kernel", "image", "settings"), MISCOMPILED)
def test_gradients_of_padded_images(cotangent, kernel, image, settings):
    """XLA ends the process in the first two, and reads memory outside of its arrays in the last one."""
    with Builder() as b:
        g, w = b.input("g", cotangent), b.input("w", kernel)
        graph = b.build({"y": ops.conv_input_grad(g, w, shape=image, groups=1, **settings)})
    backend = ml.JaxBackend()
    executable = backend.build(graph)
    assert "conv_general_dilated" not in executable.source  # otherwise the call would end this process
    rng = np.random.default_rng(0)
    arrays = {i.name: rng.normal(size=i.type.shape).astype(np.float32) for i in graph.arguments}
    result = executable({}, {n: backend.array(a) for n, a in arrays.items()})["y"]
    np.testing.assert_allclose(backend.to_numpy(result), evaluate(graph, arrays)["y"], rtol=1e-5, atol=1e-5)
