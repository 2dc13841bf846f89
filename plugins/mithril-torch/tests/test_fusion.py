"""Each operation private to this backend is generated for its subgraph, with the results of the subgraph."""

from __future__ import annotations

import numpy as np
import pytest

import mithril as ml
from mithril.graph import Op, result_name
from mithril.graph.evaluation import evaluate
from mithril.graph.registry import operation_name
from mithril.models import Conv1d, Conv2d, Gelu, LayerNorm, MaxPool2d, Model, Relu, Sigmoid, Tanh
from mithril_torch.fusion import (
    attention_gradients,
    batch_statistics,
    foreach,
    norm_gradients,
    paired_ops,
    subgraph_fusion,
)

# operation: its text in the source, layers that give it, the shape of their input
CASES = {
    "torch.relu_grad": ("threshold_backward(", [Relu], (5, 70)),
    "torch.sigmoid_grad": ("sigmoid_backward(", [Sigmoid], (5, 70)),
    "torch.tanh_grad": ("tanh_backward(", [Tanh], (5, 70)),
    "torch.gelu_grad": ("gelu_backward(", [Gelu], (3, 65)),
    "torch.layer_norm_grads": ("native_layer_norm_backward(", [LayerNorm], (4, 9, 33)),
    "torch.layer_norm_saving": ("native_layer_norm(", [LayerNorm], (4, 9, 33)),
    "torch.conv_bias": (" conv(", [lambda: Conv1d(3, 4, kernel_size=3, stride=2, padding=1)], (2, 3, 17)),
    "torch.conv_bias_relu": (
        "relu=True)",
        [lambda: Conv2d(4, 6, kernel_size=3, dilation=2, groups=2), Relu],
        (2, 4, 9, 11),
    ),
    "torch.conv_grads": ("conv_grads(", [lambda: Conv2d(3, 4, kernel_size=3, padding=1)], (2, 3, 9, 11)),
    "torch.max_pool_with_indices": (
        "max_pool_with_indices(",
        [lambda: MaxPool2d(3, stride=2, padding=1)],
        (2, 3, 9, 11),
    ),
    "torch.max_unpool": ("max_unpool(", [lambda: MaxPool2d(2, stride=1)], (2, 3, 6, 5)),
}


OF_STEPS = {"torch.lerp", "torch.each", "torch.batch_norm_for_state", "torch.batch_norm_saving"}
OF_STEPS |= {f"torch.{kind}_norm_grad{s}" for kind in ("layer", "batch") for s in ("", "s")}
OF_STEPS |= {"torch.attention_saving", "torch.attention_grads"}  # all in test_step_kernels.py


def test_every_private_operation_has_a_case():
    modules = (attention_gradients, batch_statistics, foreach, norm_gradients, paired_ops, subgraph_fusion)
    declared = {x.name for module in modules for x in vars(module).values() if isinstance(x, Op)}
    assert {name for name in declared if name.startswith("torch.")} == CASES.keys() | OF_STEPS


@pytest.mark.parametrize("scale", [1.0, 30.0])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_the_subgraph(name, dtype, scale):
    text, layers, shape = CASES[name]
    model = Model()
    for layer in layers:
        model += layer()
    backend = ml.TorchBackend(dtype=dtype)
    compiled = ml.compile(model, backend, shapes={"input": shape})
    rng = np.random.default_rng(0)
    x = (scale * rng.standard_normal(shape)).astype(dtype)
    x.flat[::7] = 0.0  # ties and kinks
    params = {
        n: backend.array(rng.standard_normal(p.shape).astype(dtype)) for n, p in compiled.randomize_params(0).items()
    }
    slope = np.cos(backend.to_numpy(compiled.evaluate(params, {"input": x})["output"]))
    outputs, gradients = compiled.evaluate(params, {"input": x}, slope, wrt=("input", *params))
    assert text in compiled.source, compiled.source
    graph = compiled.programs[-1].graph
    arrays = {n: backend.to_numpy(p) for n, p in params.items()}
    cotangent = next(i.name for i in graph.arguments if i.role == "cotangent")
    expected = evaluate(graph, {**arrays, "input": x, cotangent: slope})
    results = {**outputs, **{result_name("gradient", n): g for n, g in gradients.items()}}
    assert results.keys() == expected.keys()
    rtol = 2e-4 if dtype == "float32" else 1e-10
    for key, array in expected.items():
        result = backend.to_numpy(results[key])
        assert result.dtype == dtype
        np.testing.assert_allclose(result, array, rtol=rtol, atol=rtol * max(np.abs(array).max(), 1), err_msg=key)


def test_operations_of_kernels_need_no_registration():
    """Register no operation of ``torch.``: the names of all others would be unknown to kernels of plugins."""
    assert operation_name("torch.sigmoid_grad") == "torch.sigmoid_grad"
