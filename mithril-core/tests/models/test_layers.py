"""Layers against formulas in NumPy: values, names and shapes of parameters, state, training and inference."""

import importlib
import importlib.util
import itertools
from pathlib import Path

import numpy as np
import pytest

import mithril.models as models
from mithril.graph.dims import Dim, TensorType
from mithril.graph.dtypes import float32
from mithril.graph.errors import ModelError, ShapeError
from mithril.graph.registry import operations
from mithril.models import (
    GRU,
    LSTM,
    MLP,
    RNN,
    Accuracy,
    AdaptiveAvgPool2d,
    AvgPool2d,
    BatchNorm1d,
    BatchNorm2d,
    Concat,
    ConfusionMatrix,
    Conv1d,
    Conv2d,
    ConvTranspose2d,
    DepthwiseConv2d,
    Dropout,
    Embedding,
    F1Score,
    Flatten,
    GlobalAvgPool2d,
    GlobalMaxPool2d,
    GroupNorm,
    InstanceNorm2d,
    IOKey,
    LayerNorm,
    Linear,
    MaxPool2d,
    Model,
    MultiHeadAttention,
    Pad,
    PositionalEmbedding,
    PRelu,
    R2Score,
    Relu,
    Reshape,
    Residual,
    RMSNorm,
    RotaryEmbedding,
    Sequential,
    SinusoidalEmbedding,
    Split,
    Squeeze,
    Stack,
    Tanh,
    TopKAccuracy,
    TransformerDecoder,
    TransformerEncoder,
    Transpose,
    Unsqueeze,
    Upsample,
)
from mithril.models.language.flatten import flatten
from mithril.models.language.trace import trace_model
from mithril.models.layers.operation_layers import OperationLayer

spec = importlib.util.spec_from_file_location("model_test_helpers", Path(__file__).with_name("helpers.py"))
helpers = importlib.util.module_from_spec(spec)
spec.loader.exec_module(helpers)
run, graph_of, f32 = helpers.run, helpers.graph_of, helpers.f32


def close(actual, expected, tolerance=2e-5):
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


# -- dense --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("layer", [Linear(5), Linear(4, 5), Linear(dimension=5)])
def test_linear(layer):
    x = f32(2, 3, 4)
    out, p = run(layer, {"input": x})
    assert p["weight"].shape == (5, 4)
    close(out["output"], x @ p["weight"].T + p["bias"])


def test_the_in_size_of_linear_is_checked():
    with pytest.raises(ShapeError, match="the input has 3 features, but the layer was created for 128"):
        run(Linear(128, 10), {"input": f32(2, 3)})


def test_linear_without_bias_and_mlp():
    out, p = run(MLP([6, 3], activation="tanh"), {"input": f32(2, 4)})
    close(
        out["output"],
        np.tanh(f32(2, 4) @ p["layers.0.weight"].T + p["layers.0.bias"]) @ p["layers.1.weight"].T + p["layers.1.bias"],
    )
    assert list(run(Linear(3, bias=False), {"input": f32(2, 4)})[1]) == ["weight"]


def test_embedding():
    tokens = np.array([[0, 3], [2, 2]], np.int32)
    out, p = run(Embedding(4, 5), {"input": tokens})
    np.testing.assert_array_equal(out["output"], p["weight"][tokens])


# -- convolution --------------------------------------------------------------------------------------------------
def conv2d(x, w, stride=(1, 1), padding=(0, 0), dilation=(1, 1), groups=1):
    x = np.pad(x, ((0, 0), (0, 0), (padding[0],) * 2, (padding[1],) * 2))
    n, c, h, width = x.shape
    o, _, kh, kw = w.shape
    oh = (h - dilation[0] * (kh - 1) - 1) // stride[0] + 1
    ow = (width - dilation[1] * (kw - 1) - 1) // stride[1] + 1
    out = np.zeros((n, o, oh, ow))
    for i, j, k in itertools.product(range(oh), range(ow), range(o)):
        g = k // (o // groups)
        part = x[:, g * c // groups : (g + 1) * c // groups, i * stride[0] :, j * stride[1] :]
        part = part[:, :, : dilation[0] * (kh - 1) + 1 : dilation[0], : dilation[1] * (kw - 1) + 1 : dilation[1]]
        out[:, k, i, j] = (part * w[k]).sum((1, 2, 3))
    return out


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stride": (1, 2)},
        {"padding": (2, 1)},
        {"dilation": (1, 2)},
        {"groups": 2},
        {"stride": (2, 1), "padding": (1, 2), "dilation": (2, 1), "groups": 2},
    ],
)
def test_conv2d(options):
    x = f32(2, 4, 7, 8)
    out, p = run(Conv2d(4, 6, kernel_size=3, **options), {"input": x})
    close(out["output"], conv2d(x, p["weight"], **options) + p["bias"][:, None, None])


def test_conv_shapes_and_conventions():
    assert run(Conv2d(6, kernel_size=3, padding="same"), {"input": f32(1, 4, 5, 6)})[0]["output"].shape == (1, 6, 5, 6)
    assert run(Conv1d(4, 6, 3), {"input": f32(1, 4, 9)})[0]["output"].shape == (1, 6, 7)
    out, p = run(DepthwiseConv2d(kernel_size=3, multiplier=2), {"input": f32(1, 4, 5, 6)})
    close(out["output"], conv2d(f32(1, 4, 5, 6), p["weight"], groups=4) + p["bias"][:, None, None])


def test_conv_transpose_is_the_transpose():
    x, y = f32(1, 3, 4, 5), f32(1, 2, 9, 11, seed=1)
    layer = ConvTranspose2d(3, 2, kernel_size=3, stride=2, bias=False)
    out, p = run(layer, {"input": x})
    assert out["output"].shape == (1, 2, 9, 11)
    assert p["weight"].shape == (3, 2, 3, 3)
    close((out["output"] * y).sum(), (x * conv2d(y, p["weight"], stride=(2, 2))).sum(), 1e-3)


# -- normalization ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "layer, shape", [(BatchNorm2d(3), (4, 3, 5, 6)), (BatchNorm1d(3), (7, 3)), (BatchNorm1d(), (4, 3, 5))]
)
def test_batch_norm(layer, shape):
    x = f32(*shape) * 2 + 1
    axes = tuple(k for k in range(len(shape)) if k != 1)
    view = (1, 3, *(1,) * (len(shape) - 2))
    n = x.size / 3
    out, _ = run(layer, {"input": x}, {"running_mean": f32(3), "running_var": abs(f32(3)) + 1}, training=False)
    start = (f32(3).reshape(view), (abs(f32(3)) + 1).reshape(view))
    close(out["output"], (x - start[0]) / np.sqrt(start[1] + 1e-5))
    assert list(out) == ["output"]
    out, _ = run(layer, {"input": x}, training=True)
    mean, var = x.mean(axes), x.var(axes)
    close(out["output"], (x - mean.reshape(view)) / np.sqrt(var.reshape(view) + 1e-5), 1e-4)
    close(out["state/running_mean"], 0.1 * mean)
    close(out["state/running_var"], 0.9 + 0.1 * var * n / (n - 1))


def test_batch_norm_of_unknown_batch_size():
    flat = flatten(BatchNorm2d(3))
    graph = trace_model(flat, {"input": TensorType(float32, (Dim("B"), 3, 4, 4))}, training=True)
    from mithril.compiler.initializers import initialize
    from mithril.graph.evaluation import evaluate

    x = f32(5, 3, 4, 4)
    out = evaluate(graph, {**initialize(graph.with_role("param", "state"), 0), "input": x})
    close(out["state/running_var"], 0.9 + 0.1 * x.var((0, 2, 3)) * 80 / 79)


def normalized(x, axes, eps):
    return (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + eps)


@pytest.mark.parametrize("layer, axes", [(LayerNorm(), (-1,)), (LayerNorm(4), (-1,)), (LayerNorm([3, 4]), (-2, -1))])
def test_layer_norm(layer, axes):
    x = f32(2, 3, 4) * 3
    close(run(layer, {"input": x})[0]["output"], normalized(x, axes, 1e-5))


def test_group_instance_and_rms_norm():
    x = f32(2, 4, 3, 5) * 3
    grouped = normalized(x.reshape(2, 2, 2, 3, 5), (2, 3, 4), 1e-5).reshape(x.shape)
    close(run(GroupNorm(2, 4), {"input": x})[0]["output"], grouped)
    close(run(InstanceNorm2d(), {"input": x})[0]["output"], normalized(x, (2, 3), 1e-5))
    close(run(RMSNorm(), {"input": x})[0]["output"], x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6))
    with pytest.raises(ShapeError, match="groups=3 does not divide the 4 channels"):
        run(GroupNorm(3), {"input": x})


# -- pooling and shaping ------------------------------------------------------------------------------------------
def test_pools():
    x = f32(2, 3, 6, 8)
    windows = x.reshape(2, 3, 3, 2, 4, 2)
    close(run(MaxPool2d(2), {"input": x})[0]["output"], windows.max((3, 5)))
    close(run(AvgPool2d(2), {"input": x})[0]["output"], windows.mean((3, 5)))
    close(run(AdaptiveAvgPool2d((3, 4)), {"input": x})[0]["output"], windows.mean((3, 5)))
    close(run(GlobalAvgPool2d(), {"input": x})[0]["output"], x.mean((2, 3)))
    close(run(GlobalMaxPool2d(), {"input": x})[0]["output"], x.max((2, 3)))


@pytest.mark.parametrize(
    "layer, expected",
    [
        (Flatten(), lambda x: x.reshape(2, 12)),
        (Flatten(start=0), lambda x: x.reshape(24)),
        (Reshape(-1, 2), lambda x: x.reshape(2, 6, 2)),
        (Reshape(4, 6, batch=False), lambda x: x.reshape(4, 6)),
        (Transpose(), lambda x: x.T),
        (Transpose(0, 2, 1), lambda x: x.transpose(0, 2, 1)),
        (Unsqueeze(0), lambda x: x[None]),
        (Pad(1, (0, 2)), lambda x: np.pad(x, ((0, 0), (1, 1), (0, 2)))),
        (Sequential(Unsqueeze(0), Squeeze()), lambda x: x),
    ],
)
def test_shaping(layer, expected):
    np.testing.assert_array_equal(run(layer, {"input": f32(2, 3, 4)})[0]["output"], expected(f32(2, 3, 4)))


def test_joining_and_splitting():
    a, b = f32(2, 3), f32(2, 3, seed=1)
    np.testing.assert_array_equal(
        run(Concat(axis=1), {"input0": a, "input1": b})[0]["output"], np.concatenate([a, b], 1)
    )
    np.testing.assert_array_equal(run(Stack(), {"input0": a, "input1": b})[0]["output"], np.stack([a, b], -1))
    out, _ = run(Split([1, 2]), {"input": a})
    np.testing.assert_array_equal(out["output1"], a[:, 1:])
    assert run(Split(3), {"input": a})[0]["output2"].shape == (2, 1)
    with pytest.raises(ShapeError, match="cannot split axis -1 of size 3 into 2 equal parts"):
        run(Split(2), {"input": a})


def test_upsample():
    x = f32(1, 2, 3, 4)
    np.testing.assert_array_equal(run(Upsample(2), {"input": x})[0]["output"], x.repeat(2, 2).repeat(2, 3))


def test_prelu_and_residual():
    x = f32(2, 3)
    close(run(PRelu(), {"input": x})[0]["output"], np.where(x > 0, x, 0.25 * x))
    close(run(Residual(Tanh()), {"input": x})[0]["output"], np.tanh(x) + x)


def test_dropout():
    x = np.ones((200, 50), np.float32)
    assert run(Dropout(0.25), {"input": x})[0].keys() == {"output"}
    out, start = run(Sequential(Dropout(0.25), Dropout(0.0)), {"input": x}, training=True)
    assert set(np.unique(out["output"])) == {np.float32(0), np.float32(1 / 0.75)}
    assert abs((out["output"] == 0).mean() - 0.25) < 0.02
    assert not np.array_equal(out["state/rng"], start["rng"])
    again, _ = run(Sequential(Dropout(0.25)), {"input": x}, {"rng": out["state/rng"]}, training=True)
    assert not np.array_equal(again["output"], out["output"])
    two, _ = run(Model(Dropout(), Dropout()), {"input": x}, training=True)
    assert abs((two["output"] == 0).mean() - 0.75) < 0.02  # independent masks


# -- attention ----------------------------------------------------------------------------------------------------
def attention(p, q, k, v, heads, kv_heads, mask=None, prefix=""):
    def project(x, name, n):
        y = x @ p[f"{prefix}{name}.weight"].T + p[f"{prefix}{name}.bias"]
        return y.reshape(*x.shape[:2], n, -1).transpose(0, 2, 1, 3)

    a, b, c = project(q, "query", heads), project(k, "key", kv_heads), project(v, "value", kv_heads)
    b, c = (np.repeat(t, heads // kv_heads, axis=1) for t in (b, c))
    scores = a @ b.transpose(0, 1, 3, 2) / np.sqrt(a.shape[-1])
    scores = scores if mask is None else np.where(mask, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    y = (weights / weights.sum(-1, keepdims=True)) @ c
    y = y.transpose(0, 2, 1, 3).reshape(*q.shape[:2], -1)
    return y @ p[f"{prefix}output.weight"].T + p[f"{prefix}output.bias"]


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("causal", [False, True])
def test_self_attention(kv_heads, causal):
    x = f32(2, 5, 8)
    out, p = run(MultiHeadAttention(8, 4, kv_heads=kv_heads, causal=causal), {"query": x})
    close(out["output"], attention(p, x, x, x, 4, kv_heads, np.tril(np.ones((5, 5), bool)) if causal else None))


def test_cross_attention_with_a_mask():
    model = Model()
    model |= MultiHeadAttention(8, 2, name="a")(query="q", key="m", mask="mask", output="output")
    q, m = f32(2, 3, 8), f32(2, 5, 8, seed=1)
    mask = np.arange(5) < np.array([5, 3]).reshape(2, 1, 1, 1)
    out, p = run(model, {"q": q, "m": m, "mask": mask})
    close(out["output"], attention(p, q, m, m, 2, 2, mask, "a."))


def test_a_cache_equals_the_full_sequence():
    from mithril.compiler.initializers import initialize
    from mithril.graph.evaluation import evaluate

    x = f32(1, 6, 8)
    full, p = run(MultiHeadAttention(8, 2, causal=True, rotary=True), {"query": x})
    cached = MultiHeadAttention(8, 2, causal=True, rotary=True, cache=10)
    parts, state = [], {}
    for start, stop in ((0, 3), (3, 4), (4, 6)):
        inputs = {"query": x[:, start:stop], "position": np.int32(start)}
        graph = graph_of(cached, inputs)
        state = state or initialize(graph.with_role("state"), 0)
        out = evaluate(graph, {**p, **state, **inputs})
        parts.append(out["output"])
        state = {n: out[f"state/{n}"] for n in state}
    close(np.concatenate(parts, 1), full["output"])


@pytest.mark.parametrize(
    "layer", [PositionalEmbedding(9), SinusoidalEmbedding(), RotaryEmbedding(), MultiHeadAttention(8, 2, cache=9)]
)
def test_rows_at_other_positions_equal_separate_calls(layer):
    from mithril.graph.evaluation import evaluate

    x, starts = f32(3, 4, 8), np.array([0, 5, 2], np.int32)
    name = "query" if isinstance(layer, MultiHeadAttention) else "input"
    x = x[:, None] if isinstance(layer, RotaryEmbedding) else x  # one head
    out, p = run(layer, {name: x, "position": starts})
    for row, start in enumerate(starts):
        graph = graph_of(layer, {name: x[row : row + 1], "position": start})
        zeros = {i.name: np.zeros(i.type.shape, np.float32) for i in graph.with_role("state")}
        separate = evaluate(graph, {**p, **zeros, name: x[row : row + 1], "position": start})
        close(out["output"][row : row + 1], separate["output"])


@pytest.mark.parametrize(
    "layer", [PositionalEmbedding(9), SinusoidalEmbedding(), RotaryEmbedding(), MultiHeadAttention(8, 2, cache=9)]
)
@pytest.mark.parametrize("rows", [1, 3])
def test_positions_of_another_batch_are_rejected(layer, rows):
    x = f32(rows, 4, 8)
    name = "query" if isinstance(layer, MultiHeadAttention) else "input"
    x = x[:, None] if isinstance(layer, RotaryEmbedding) else x
    with pytest.raises(ShapeError, match=rf"'position' has 2 elements, and the batch has {rows} rows(.|\n)*\[{rows}\]"):
        run(layer, {name: x, "position": np.zeros(2, np.int32)})


def test_masks_and_caches_hide_the_same_positions():
    x, mask = f32(1, 4, 8), np.array([True, False, True, True, True, True])
    model = Model()
    model |= MultiHeadAttention(8, 2, cache=6, name="a")("query", "position", mask="mask", output="output")
    out, p = run(model, {"query": x, "position": np.int32(0), "mask": mask})
    seen = np.tril(np.ones((4, 4), bool)) & mask[:4]
    close(out["output"], attention(p, x, x, x, 2, 2, seen, "a."))


def test_positions():
    x = f32(2, 5, 6)
    out, p = run(PositionalEmbedding(9), {"input": x})
    close(out["output"], x + p["weight"][:5])
    angles = np.arange(5)[:, None] * 10000.0 ** (-np.arange(0, 6, 2) / 6)
    close(
        run(SinusoidalEmbedding(), {"input": x})[0]["output"],
        x + np.stack([np.sin(angles), np.cos(angles)], -1).reshape(5, 6),
    )
    with pytest.raises(ShapeError, match="5 positions, the layer has 4"):
        run(PositionalEmbedding(4), {"input": x})


def test_rotary_keeps_norms_and_depends_on_differences_only():
    x = np.tile(f32(1, 1, 1, 8), (1, 1, 6, 1))
    out, _ = run(RotaryEmbedding(), {"input": x})
    y = out["output"][0, 0]
    close(np.linalg.norm(y, axis=-1), np.linalg.norm(x[0, 0], axis=-1))
    close(y[0], x[0, 0, 0])
    close(y[1] @ y[3], y[2] @ y[4], 1e-4)


@pytest.mark.parametrize("norm_first", [False, True])
def test_transformer_encoder(norm_first):
    x = f32(2, 4, 8)
    norms = {f"layers.0.norm{k}.{n}": f32(8, seed=k) + 1 for k in (1, 2) for n in ("weight", "bias")}
    out, p = run(TransformerEncoder(1, 8, 2, feedforward=16, norm_first=norm_first), {"input": x}, norms)

    def attend(y):
        return attention(p, y, y, y, 2, 2, prefix="layers.0.self_attn.")

    def feed(y):
        h = np.maximum(y @ p["layers.0.linear1.weight"].T + p["layers.0.linear1.bias"], 0)
        return h @ p["layers.0.linear2.weight"].T + p["layers.0.linear2.bias"]

    def norm(y, k):
        return normalized(y, (-1,), 1e-5) * p[f"layers.0.norm{k}.weight"] + p[f"layers.0.norm{k}.bias"]

    if norm_first:
        h = x + attend(norm(x, 1))
        expected = h + feed(norm(h, 2))
    else:
        h = norm(x + attend(x), 1)
        expected = norm(h + feed(h), 2)
    close(out["output"], expected, 1e-4)


def test_transformer_decoder_reads_the_memory():
    decoder = TransformerDecoder(2, 8, 2, feedforward=16)
    x, memory = f32(2, 3, 8), f32(2, 5, 8, seed=1)
    out, p = run(decoder, {"input": x, "memory": memory})
    other, _ = run(decoder, {"input": x, "memory": memory + 1})
    assert out["output"].shape == (2, 3, 8)
    assert not np.allclose(out["output"], other["output"])
    assert "layers.1.multihead_attn.key.weight" in p
    later = x.copy()
    later[:, 2] += 1
    close(run(decoder, {"input": later, "memory": memory})[0]["output"][:, :2], out["output"][:, :2])


# -- recurrent ----------------------------------------------------------------------------------------------------
def rnn_step(x, h, c, w, u, b, d):
    return np.tanh(x @ w.T + b + h @ u.T + d), c


def gru_step(x, h, c, w, u, b, d):
    xr, xz, xn = np.split(x @ w.T + b, 3, 1)
    hr, hz, hn = np.split(h @ u.T + d, 3, 1)
    z, n = sigmoid(xz + hz), np.tanh(xn + sigmoid(xr + hr) * hn)
    return (1 - z) * n + z * h, c


def lstm_step(x, h, c, w, u, b, d):
    i, f, g, o = np.split(x @ w.T + b + h @ u.T + d, 4, 1)
    c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
    return sigmoid(o) * np.tanh(c), c


@pytest.mark.parametrize("kind, step", [(RNN, rnn_step), (GRU, gru_step), (LSTM, lstm_step)])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_recurrent(kind, step, bidirectional):
    x = f32(2, 5, 3)
    out, p = run(kind(3, 4, layers=2, bidirectional=bidirectional), {"input": x})
    y, lasts = x, []
    for layer in range(2):
        outputs = []
        for suffix in ("", "_reverse")[: 1 + bidirectional]:
            names = [f"{n}_l{layer}{suffix}" for n in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
            h = c = np.zeros((2, 4))
            hs = []
            for t in range(5)[:: -1 if suffix else 1]:
                h, c = step(y[:, t], h, c, *(p[n] for n in names))
                hs.append(h)
            lasts.append(h)
            outputs.append(np.stack(hs[:: -1 if suffix else 1], 1))
        y = np.concatenate(outputs, 2)
    close(out["output"], y)
    close(out["last_hidden"], np.stack(lasts))
    assert ("last_cell" in out) == (kind is LSTM)


def test_recurrent_continues_from_a_state():
    x = f32(2, 6, 3)
    layer = LSTM(4)
    full, p = run(layer, {"input": x})
    first, _ = run(layer, {"input": x[:, :4]})
    model = Model()
    start = {"hidden": "h", "cell": "c"}
    model |= LSTM(4)(input="x", output="output", **start)
    rest, _ = run(
        model,
        {"x": x[:, 4:], "h": first["last_hidden"], "c": first["last_cell"]},
        {f"lstm.{n}": a for n, a in p.items()},
    )
    close(rest["output"], full["output"][:, 4:])


# -- metrics, and every layer -------------------------------------------------------------------------------------
def test_metrics():
    logits = np.array([[3, 1, 0], [0, 2, 1], [1, 0, 2], [5, 4, 0]], np.float32)
    labels = np.array([0, 2, 2, 1], np.int32)
    inputs = {"logits": logits, "labels": labels}
    assert run(Accuracy(), inputs)[0]["output"] == 0.5
    assert run(TopKAccuracy(2), inputs)[0]["output"] == 1.0
    matrix = [[1, 0, 0], [1, 0, 0], [0, 1, 1]]
    np.testing.assert_array_equal(run(ConfusionMatrix(3), inputs)[0]["output"], matrix)
    binary = {"predictions": np.array([0.9, 0.8, 0.2, 0.1], np.float32), "labels": np.array([1, 0, 1, 0], np.int32)}
    assert run(F1Score(), binary)[0]["output"] == 0.5
    predicted = {"predictions": np.array([0.9, 0.8, 0.7, 0.1], np.float32), "labels": np.array([1, 1, 0, 1], np.int32)}
    close(run(models.Precision(), predicted)[0]["output"], 2 / 3)
    close(run(models.Recall(0.75), predicted)[0]["output"], 2 / 3)
    chances = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    expected = np.exp(-np.log(chances[np.arange(4), labels]).mean())
    close(run(models.Perplexity(), inputs)[0]["output"], expected)
    x, y = f32(9), f32(9, seed=1)
    close(
        run(R2Score(), {"predictions": x, "targets": y})[0]["output"],
        1 - ((x - y) ** 2).sum() / ((y - y.mean()) ** 2).sum(),
    )


OPERATIONS = sorted(
    (
        v
        for v in vars(importlib.import_module("mithril.models.layers.operation_layers")).values()
        if isinstance(v, type)
    ),
    key=lambda c: c.__name__,
)


@pytest.mark.parametrize("kind", [k for k in OPERATIONS if issubclass(k, OperationLayer) and k is not OperationLayer])
def test_every_row_names_an_operation(kind):
    assert kind.op_name in operations()
    assert getattr(models, kind.__name__) is kind


def test_rows_take_attributes_and_check_them():
    x = f32(2, 3)
    close(run(models.Softmax(axis=0), {"input": x})[0]["output"], np.exp(x) / np.exp(x).sum(0))
    close(run(models.Clip(-0.5, 0.5), {"input": x})[0]["output"], x.clip(-0.5, 0.5))
    with pytest.raises(ModelError, match="Clip takes 2 arguments, got 3"):
        models.Clip(1, 2, 3)


def test_the_wished_model():
    model = Model()
    model |= Conv2d(3, 64, kernel_size=3)
    model += BatchNorm2d(64)
    model += Relu()
    model += Conv2d(64, 128, kernel_size=3)
    model += GlobalAvgPool2d()
    model += Linear(128, 10)
    out, p = run(model, {"input": f32(2, 3, 8, 8)}, inference=True)
    assert out["output"].shape == (2, 10)
    assert list(p)[:3] == ["conv2d.weight", "conv2d.bias", "batch_norm2d.weight"]


def test_tied_weights():
    table = IOKey("table", trainable=True, init="normal(std=0.02)")
    model = Model()
    model |= Embedding(7, 4)(input=IOKey("tokens", dtype="int32"), weight=table, output="x")
    model |= Linear(7, bias=False)(input="x", weight="table", output="logits")
    tokens = np.array([[1, 2]], np.int32)
    out, p = run(model, {"tokens": tokens})
    assert list(p) == ["table"]
    close(out["logits"], p["table"][tokens] @ p["table"].T)


def test_a_sequence_has_positions_a_length_and_parts():
    net = models.Sequential(models.Linear(3), models.Relu(), models.Linear(2))
    assert len(net) == 3 and list(net) == [net[0], net[1], net[-1]] and bool(models.Sequential())
    head = net[:-1]
    assert isinstance(head, models.Sequential) and list(head) == [net[0], net[1]]
