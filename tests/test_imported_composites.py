"""Attention, norms and activations are recognized in exported programs, and the results are those of the source."""

from __future__ import annotations

import io
import sys
from collections import Counter
from pathlib import Path

import jax
import numpy as np
import onnx.reference
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import mithril as ml

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import bench_imported as source

TOKENS = np.arange(12, dtype=np.int64).reshape(2, 6)
ENCODER = {"attention": 1, "layer_norm": 2, "gelu": 1}
DECODER = {"attention": 1, "rms_norm": 2, "silu": 1}


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    sizes = {"WIDTH": 8, "HEADS": 4, "KEYS": 2, "INNER": 12, "DEPTH": 1, "WORDS": 12}
    for name, size in sizes.items():
        monkeypatch.setattr(source, name, size)


def network(decoder):
    torch.manual_seed(0)
    module = source.Network(decoder).eval()
    for parameter in module.parameters():  # norms start as ones, which fold away
        torch.nn.init.normal_(parameter, std=0.5)
    return module


def expected(module):
    return module(torch.from_numpy(TOKENS)).detach().numpy()


def composites(model, inputs, result, backend="numpy"):
    """Return the composites of the program, whose result is that of the source."""
    compiled = ml.compile(model, backend, shapes={n: x.shape for n, x in inputs.items()}, inference=True)
    values = compiled(inputs)
    assert np.allclose(values[model.outputs[0]], result, rtol=1e-4, atol=1e-5)
    nodes = [n for n in compiled.programs[-1].graph.nodes if not n.is_constant]
    counts = Counter(n.op.name for n in nodes)
    counts.update(n.attributes["activation"] for n in nodes if n.op.name == "linear")
    return counts


def recognized(counts, names):
    spelled = ("softmax", "exp", "erf", "tanh", "mean", "rsqrt", "sqrt", "div", "dot", "isnan")
    assert {name: counts[name] for name in names} == names
    assert not [name for name in spelled if counts[name]]


class Fused(source.Attention):
    """The same attention by the function of PyTorch, whose exporters guard rows without keys."""

    def forward(self, x, cos, sin, mask):
        batch, length, _ = x.shape
        q, k, v = (p(x).view(batch, length, -1, self.size).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return self.o(y.transpose(1, 2).reshape(batch, length, -1))


def to_onnx(module, opset):
    file = io.BytesIO()
    torch.onnx.export(
        module, (torch.from_numpy(TOKENS),), file, dynamo=False, opset_version=opset, input_names=["tokens"]
    )
    return ml.from_onnx(file.getvalue())


TORCH = {
    "torch.export": lambda module: ml.from_torch(module, torch.from_numpy(TOKENS), training=False),
    "ONNX opset 14": lambda module: to_onnx(module, 14),
    "ONNX opset 17": lambda module: to_onnx(module, 17),
    "ONNX opset 20": lambda module: to_onnx(module, 20),
}


@pytest.mark.parametrize("decoder", [False, True], ids=["encoder", "decoder"])
@pytest.mark.parametrize("export", TORCH.values(), ids=TORCH)
@pytest.mark.filterwarnings("ignore")  # deprecations of PyTorch's older exporters
def test_networks_of_pytorch(export, decoder):
    module = network(decoder)
    model = export(module)
    counts = composites(model, {model.inputs[0]: TOKENS}, expected(module))
    recognized(counts, DECODER if decoder else ENCODER)


@pytest.mark.parametrize("export", [TORCH["torch.export"], TORCH["ONNX opset 17"]], ids=["torch.export", "ONNX"])
@pytest.mark.filterwarnings("ignore")
def test_the_attention_function_of_pytorch(export, monkeypatch):
    monkeypatch.setattr(source, "Attention", Fused)
    module = network(False)
    model = export(module)
    recognized(composites(model, {model.inputs[0]: TOKENS}, expected(module)), ENCODER)


def jax_function(decoder):
    module = network(decoder)
    params = {name: jax.numpy.asarray(p.detach().numpy()) for name, p in module.named_parameters()}
    return module, params, source.in_jax(decoder)


def recognized_in_jax(counts, decoder):
    names = DECODER if decoder else ENCODER
    assert {name: counts[name] for name in names} == names
    assert not counts["softmax"] and not counts["erf"] and not counts["erfc"]


@pytest.mark.parametrize("decoder", [False, True], ids=["encoder", "decoder"])
def test_functions_of_jax(decoder):
    module, params, function = jax_function(decoder)
    model = ml.from_jax(function, TOKENS, params=params)
    counts = composites(model, {"tokens": TOKENS}, expected(module))
    recognized_in_jax(counts, decoder)


@pytest.mark.parametrize("decoder", [False, True], ids=["encoder", "decoder"])
def test_programs_of_stablehlo(decoder):
    module, params, function = jax_function(decoder)
    tokens = TOKENS.astype(np.int32)
    model = ml.from_stablehlo(jax.jit(lambda x: function(params, x)).lower(tokens).as_text())
    recognized_in_jax(composites(model, {model.inputs[0]: tokens}, expected(module)), decoder)


class NarrowAttention(source.Attention):
    """The same attention as Hugging Face writes it for 16 bits: the softmax in float32."""

    def forward(self, x, cos, sin, mask):
        batch, length, _ = x.shape
        q, k, v = (p(x).view(batch, length, -1, self.size).transpose(1, 2) for p in (self.q, self.k, self.v))
        cos, sin, mask = (t.to(x.dtype) for t in (cos, sin, mask))
        if self.rotary:
            q, k = (t * cos + source._rotated(t) * sin for t in (q, k))
            k, v = (t.repeat_interleave(source.HEADS // self.keys, 1) for t in (k, v))
        scores = torch.matmul(q, k.transpose(2, 3)) * self.size**-0.5 + mask
        weights = torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype)
        return self.o(torch.matmul(weights, v).transpose(1, 2).reshape(batch, length, -1))


class NarrowNorm(source.Norm):
    """The RMS norm of Hugging Face, in float32."""

    def forward(self, x):
        h = x.to(torch.float32)
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * h.to(x.dtype)


def narrow_counts(model, inputs, result, backend, level):
    compiled = ml.compile(
        model, backend, shapes={n: x.shape for n, x in inputs.items()}, inference=True, optimization_level=level
    )
    values = np.asarray(compiled(inputs)[model.outputs[0]], np.float32)
    np.testing.assert_allclose(values, result, rtol=0.05, atol=0.05 * np.abs(result).max())
    counts = Counter(n.op.name for n in compiled.programs[-1].graph.nodes)
    counts.update(n.attributes["activation"] for n in compiled.programs[-1].graph.nodes if n.op.name == "linear")
    return counts


# Scores of float16 can overflow, where attention does not: the default level keeps them.
NARROW = [("bfloat16", "medium"), ("float16", "high")]


@pytest.mark.parametrize("decoder", [False, True], ids=["encoder", "decoder"])
@pytest.mark.parametrize(("dtype", "level"), NARROW, ids=["bfloat16", "float16"])
@pytest.mark.filterwarnings("ignore")
def test_networks_of_16_bits(dtype, level, decoder, monkeypatch):
    monkeypatch.setattr(source, "Attention", NarrowAttention)
    monkeypatch.setattr(source, "Norm", NarrowNorm)
    module = network(decoder)
    result = expected(module)
    params = {name: jax.numpy.asarray(p.detach().numpy()).astype(dtype) for name, p in module.named_parameters()}
    names = DECODER if decoder else ENCODER
    imported = [ml.from_jax(source.in_jax(decoder), TOKENS, params=params)]
    module.to(getattr(torch, dtype))
    imported.append(TORCH["torch.export"](module))
    if dtype == "float16":
        imported.append(to_onnx(module, 17))
    for model in imported:
        inputs = {model.inputs[0]: TOKENS}
        counts = narrow_counts(model, inputs, result, "numpy", level)
        assert {name: counts[name] for name in names} == names
        assert not counts["softmax"] and not counts["rsqrt"] and not counts["erf"]


@pytest.mark.parametrize("low", [-np.inf, np.finfo(np.float32).min], ids=["infinite", "finite"])
def test_attention_of_flax(low):
    q, k, v = (np.random.default_rng(n).normal(size=(2, 6, 4, 8)).astype(np.float32) for n in range(3))

    def attend(q, k, v):
        scores = jax.numpy.einsum("...qhd,...khd->...hqk", q / np.sqrt(8).astype(np.float32), k)
        weights = jax.nn.softmax(jax.numpy.where(np.tril(np.ones((6, 6), bool)), scores, low))
        return jax.numpy.einsum("...hqk,...khd->...qhd", weights, v)

    model = ml.from_jax(attend, q, k, v)
    counts = composites(model, {"q": q, "k": k, "v": v}, attend(q, k, v))
    assert counts["attention"] == 1 and not counts["softmax"]


@pytest.mark.parametrize("added", [False, True], ids=["selected", "added"])
@pytest.mark.parametrize("low", [-np.inf, np.finfo(np.float32).min], ids=["infinite", "finite"])
def test_gradients_where_a_row_has_no_keys(low, added):
    rng = np.random.default_rng(0)
    x, *weights = (rng.normal(size=shape).astype(np.float32) for shape in ((2, 4, 6, 8), (8, 8), (8, 8), (8, 8), (8,)))
    params = dict(zip("qkvw", weights, strict=True))
    mask = np.tril(np.ones((6, 6), bool))
    mask[2] = False

    def attend(p, x):
        x = x * jax.lax.rsqrt(jax.numpy.mean(x**2, -1, keepdims=True) + 1e-6) * p["w"]
        q, k, v = (x @ p[n] for n in "qkv")
        scores = q @ jax.numpy.swapaxes(k, 2, 3)
        scores = scores + np.where(mask, 0, low) if added else jax.numpy.where(mask, scores, low)
        return jax.nn.softmax(scores, -1) @ v

    model = ml.from_jax(attend, x, params=params)
    results = []
    for level in ("none", "medium", "high"):
        compiled = ml.compile(model, "numpy", shapes={"x": x.shape}, optimization_level=level)
        results.append(compiled.evaluate(params, {"x": x}, {model.outputs[0]: np.ones_like(x)}))
        names = [n.op.name for program in compiled.programs for n in program.graph.nodes]
        assert ("attention" in names) == (level != "none")
    for values, gradients in results[1:]:
        np.testing.assert_allclose(values[model.outputs[0]], results[0][0][model.outputs[0]], rtol=1e-4, atol=1e-5)
        for name, gradient in gradients.items():
            np.testing.assert_allclose(gradient, results[0][1][name], rtol=1e-3, atol=1e-4)


def tensorflow_file():
    """Return a file as tf2onnx writes a Keras block: one transpose for heads and keys, squared differences, roots."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 6, 8)).astype(np.float32)
    weights = {name: rng.normal(size=(8, 8)).astype(np.float32) * 0.4 for name in ("wq", "wk", "wv")}
    vectors = {name: rng.normal(size=8).astype(np.float32) for name in ("gamma", "beta")}
    scalars = {"scale": np.float32(0.5), "eps": np.float32(1e-3), "half": np.float32(0.5), "one": np.float32(1)}
    scalars |= {"root": np.float32(np.sqrt(2))}
    arrays = {**weights, **vectors, **scalars, "heads": np.array([2, 6, 2, 4]), "joined": np.array([2, 6, 8])}
    nodes = [
        node
        for n, perm in (("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3]))
        for node in (
            helper.make_node("MatMul", ["x", f"w{n}"], [f"{n}0"]),
            helper.make_node("Reshape", [f"{n}0", "heads"], [f"{n}1"]),
            helper.make_node("Transpose", [f"{n}1"], [n], perm=perm),
        )
    ]
    nodes += [
        helper.make_node("Mul", ["q", "scale"], ["scaled"]),
        helper.make_node("MatMul", ["scaled", "k"], ["scores"]),
        helper.make_node("Softmax", ["scores"], ["weights"], axis=-1),
        helper.make_node("MatMul", ["weights", "v"], ["mixed"]),
        helper.make_node("Transpose", ["mixed"], ["rows"], perm=[0, 2, 1, 3]),
        helper.make_node("Reshape", ["rows", "joined"], ["h"]),
        helper.make_node("ReduceMean", ["h"], ["mean"], axes=[-1], keepdims=1),
        helper.make_node("Sub", ["h", "mean"], ["centered"]),
        helper.make_node("Mul", ["centered", "centered"], ["squared"]),
        helper.make_node("ReduceMean", ["squared"], ["variance"], axes=[-1], keepdims=1),
        helper.make_node("Add", ["variance", "eps"], ["shifted"]),
        helper.make_node("Sqrt", ["shifted"], ["deviation"]),
        helper.make_node("Reciprocal", ["deviation"], ["inverse"]),
        helper.make_node("Mul", ["inverse", "gamma"], ["factor"]),
        helper.make_node("Mul", ["h", "factor"], ["first"]),
        helper.make_node("Mul", ["mean", "factor"], ["second"]),
        helper.make_node("Sub", ["beta", "second"], ["offset"]),
        helper.make_node("Add", ["first", "offset"], ["normal"]),
        helper.make_node("Div", ["normal", "root"], ["divided"]),
        helper.make_node("Erf", ["divided"], ["erf"]),
        helper.make_node("Add", ["erf", "one"], ["added"]),
        helper.make_node("Mul", ["added", "half"], ["halved"]),
        helper.make_node("Mul", ["normal", "halved"], ["y"]),
    ]
    tensors = [numpy_helper.from_array(np.asarray(a), n) for n, a in arrays.items()]
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [2, 6, 8]) for n in ("x", "y")]
    graph = helper.make_graph(nodes, "keras", ends[:1], ends[1:], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 15)], ir_version=10), x


def test_files_of_tensorflow():
    proto, x = tensorflow_file()
    (y,) = onnx.reference.ReferenceEvaluator(proto).run(None, {"x": x})
    recognized(composites(ml.from_onnx(proto), {"x": x}, y), {"attention": 1, "layer_norm": 1, "gelu": 1})
