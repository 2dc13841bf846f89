"""Pairs of operations that PyTorch computes in one call are matched, with equal results; single ones are unchanged."""

from __future__ import annotations

import numpy as np
import pytest

import mithril as ml
from mithril.graph.evaluation import evaluate
from mithril.models import Conv2d, MaxPool2d, Model, Relu


def net(stride, padding):
    model = Model()
    model += Conv2d(3, 4, kernel_size=3, padding=1, name="a")
    model += Relu()
    model += MaxPool2d(3, stride=2, padding=1)
    model += Conv2d(4, 5, kernel_size=3, stride=stride, padding=padding, name="b")
    model += MaxPool2d(2, stride=1, padding=0)
    return model


@pytest.mark.parametrize("rows", [2, None])
@pytest.mark.parametrize(("stride", "padding"), [(1, 1), (2, 0), ((2, 1), (1, 2))])
def test_gradients_are_those_of_single_operations(rows, stride, padding):
    x = np.random.default_rng(0).standard_normal((2, 3, 9, 11)).astype(np.float32)
    x[0, 0, 2:5] = x[0, 0, 2, 2]  # of equal maxima the first counts
    compiled = ml.compile(net(stride, padding), "torch", shapes={"input": [rows, 3, 9, 11]}, seed=1)
    params = compiled.randomize_params(0)
    slope = np.cos(compiled.backend.to_numpy(compiled.evaluate(params, {"input": x})["output"]))
    outputs, gradients = compiled.evaluate(params, {"input": x}, slope, wrt=("input", *params))
    assert compiled.source.count("= conv_grads(") == 2
    assert compiled.source.count("= max_unpool(") == 2
    arrays = {n: compiled.backend.to_numpy(p) for n, p in params.items()}
    expected = evaluate(compiled.programs[-1].graph, {**arrays, "input": x, "grad/output": slope})
    results = {**outputs, **{f"grad/{n}": g for n, g in gradients.items()}}
    assert set(results) == set(expected)
    for name, array in expected.items():
        np.testing.assert_allclose(compiled.backend.to_numpy(results[name]), array, rtol=1e-4, atol=1e-4, err_msg=name)


def test_single_gradients_are_not_paired():
    """The image of the first convolution needs no gradient."""
    compiled = ml.compile(net(1, 1), "torch", shapes={"input": [2, 3, 9, 11]})
    x, params = np.ones((2, 3, 9, 11), np.float32), compiled.randomize_params(0)
    y = compiled.evaluate(params, {"input": x})["output"]
    compiled.evaluate(params, {"input": x}, y)
    assert compiled.source.count("= conv_grads(") == 1
    assert compiled.source.count("= conv_weight_grad(") == 1
