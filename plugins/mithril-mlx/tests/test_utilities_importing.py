"""``import_function``: graphs of MLX functions match the functions."""

from __future__ import annotations

import mlx.nn as nn
import numpy as np
import pytest

import mithril as ml
from mithril.graph.evaluation import evaluate
from mithril_mlx import import_function
from mithril_mlx.mlx_loader import mx
from mithril_mlx.utilities.op_chain import build

X = mx.array(np.random.default_rng(0).uniform(0.1, 2.0, (4, 6)).astype(np.float32))
W = mx.array(np.random.default_rng(1).standard_normal((6, 6)).astype(np.float32))
IMAGE = mx.array(np.random.default_rng(2).standard_normal((2, 8, 8, 3)).astype(np.float32))
FILTER = mx.array(np.random.default_rng(3).standard_normal((5, 3, 3, 3)).astype(np.float32))
ROWS = mx.array([2, 0, -1])

FUNCTIONS = {
    "arithmetic": (lambda x, w: (x @ w - x) / 3 + x**2 * 0.5, X, W),
    "bias": (lambda x, w: mx.addmm(w[0], x, w, alpha=2.0, beta=0.5), X, W),
    "logarithms": (lambda x: mx.log(x) + mx.log2(x) + mx.log10(x) + mx.log1p(x), X),
    "roots": (lambda x: mx.sqrt(x) + mx.rsqrt(x) + mx.exp(-x), X),
    "reductions": (lambda x: x.sum(axis=0) * x.max() - x.min(axis=1).mean() + mx.prod(x, axis=0), X),
    "spread": (lambda x: mx.var(x, axis=1, keepdims=True) + mx.std(x), X),
    "choices": (lambda x: mx.where((x > 1) & (x < 1.5), x, mx.maximum(x, 0.7)), X),
    "positions": (lambda x: mx.argmax(x, axis=1) + mx.argmin(x, axis=1), X),
    "shapes": (lambda x: mx.stack([x, x]).swapaxes(0, 2).flatten(1)[..., None].squeeze(-1).reshape(3, 16), X),
    "unflatten": (lambda x: mx.unflatten(x, 1, (2, 3)).transpose(1, 0, 2), X),
    "slices": (lambda x: mx.concatenate([x[1:, ::2], x[:3, 3:]], axis=1), X),
    "splits": (lambda x: mx.split(x, 3, axis=1)[1] * mx.split(x, [2, 4], axis=1)[0], X),
    "pads": (lambda x: mx.pad(x, ((0, 1), (2, 0)), constant_values=3.0), X),
    "rows": (lambda x, i: x[i] + mx.take(x, i, axis=0), X, ROWS),
    "columns": (lambda x, i: mx.take(x, i, axis=1), X, ROWS),
    "sorting": (lambda x: mx.take_along_axis(x, mx.argsort(x, axis=1), axis=1) + mx.sort(x, axis=1), X),
    "running": (lambda x: mx.cumsum(x, axis=1) + mx.cumsum(x, axis=0, reverse=True, inclusive=False), X),
    "softmax": (lambda x: mx.softmax(x, axis=-1) + mx.logsumexp(x, axis=-1, keepdims=True), X),
    "norms": (lambda x: mx.fast.layer_norm(x, x[0], x[1], 1e-5) + mx.fast.rms_norm(x, x[0], 1e-5), X),
    "activations": (lambda x: nn.gelu(x) + nn.silu(x) + nn.relu(x) + mx.sigmoid(x) + mx.erf(x), X),
    "attention": (lambda x: mx.fast.scaled_dot_product_attention(*[x[None, None]] * 3, scale=0.5), X),
    "convolution": (lambda x, w: mx.conv2d(x, w, stride=2, padding=1), IMAGE, FILTER),
    "grouped": (lambda x, w: mx.conv2d(mx.concatenate([x] * 5, axis=-1), w, groups=5), IMAGE, FILTER),
    "bits": (lambda i: (i & 1) | (i ^ 3) << 2, ROWS),
    "halves": (lambda x: (x.astype(mx.float16) * 2).astype(mx.float32) + mx.full((6,), 2.0), X),
    "integers": (lambda i: i * 3 + mx.remainder(i, 2), ROWS),
    "gradients": (mx.grad(lambda x, w: mx.tanh(x @ w).square().sum()), X, W),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_graph_matches_the_function(name):
    function, *arrays = FUNCTIONS[name]
    graph = import_function(function, *arrays)
    expected = np.array(function(*arrays))
    (expected_output,) = evaluate(
        graph, {i.name: np.array(a) for i, a in zip(graph.arguments, arrays, strict=True)}
    ).values()
    assert expected_output.dtype == expected.dtype or name == "positions"
    np.testing.assert_allclose(expected_output, expected, rtol=2e-3 if name == "halves" else 2e-4, atol=1e-5)


def test_it_runs_and_scalars_are_not_broadcast_by_hand():
    graph = import_function(lambda x: mx.maximum(x * 2 + 1, 0), X)
    assert "broadcast_to" not in str(graph)
    np.testing.assert_allclose(build(graph, jit=False)(X), mx.maximum(X * 2 + 1, 0), rtol=1e-6)


def test_a_module_with_its_weights():
    model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 2))
    mx.eval(model.parameters())
    graph = import_function(model, X)
    (output,) = evaluate(graph, {"x0": np.array(X)}).values()
    np.testing.assert_allclose(output, model(X), rtol=1e-4, atol=1e-5)


def test_unsupported_primitives_are_named():
    with pytest.raises(ml.UnsupportedError, match="'Hadamard' cannot be imported"):
        import_function(lambda x: mx.hadamard_transform(x[:, :4]), X)
    with pytest.raises(ml.UnsupportedError, match="several arrays at once"):
        import_function(lambda x, i: x[i, i], X, ROWS)
