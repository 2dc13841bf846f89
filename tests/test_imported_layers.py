"""Layers of imported models: by the paths of the source, replaced, frozen, read, trained with LoRA and merged."""

from __future__ import annotations

import io
import sys
import warnings
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import mithril as ml
from mithril.models import Linear, hook
from mithril_lora import Adapter, LoRA

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "plugins" / "mithril-keras" / "tests"))
from adapting import train_merge_and_write


class Attention(torch.nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.c_attn = torch.nn.Linear(size, 3 * size)
        self.c_proj = torch.nn.Linear(size, size)

    def forward(self, x: Any) -> Any:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.c_attn(x).chunk(3, dim=-1))
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class Block(torch.nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = torch.nn.LayerNorm(size), torch.nn.LayerNorm(size)
        self.attn = Attention(size)
        self.mlp = torch.nn.Sequential(torch.nn.Linear(size, 24), torch.nn.GELU(), torch.nn.Linear(24, size))

    def forward(self, x: Any) -> Any:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Gpt(torch.nn.Module):
    """A nanoGPT: the head shares the table of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = torch.nn.Embedding(20, 8), torch.nn.Embedding(16, 8)
        self.h = torch.nn.ModuleList([Block(8), Block(8)])
        self.ln_f = torch.nn.LayerNorm(8)
        self.lm_head = torch.nn.Linear(8, 20, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, ids: Any) -> Any:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


class Vit(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = torch.nn.Conv2d(3, 8, 4, stride=4)
        self.blocks = torch.nn.Sequential(Block(8), Block(8))
        self.head = torch.nn.Linear(8, 5)

    def forward(self, images: Any) -> Any:
        return self.head(self.blocks(self.patch(images).flatten(2).transpose(1, 2)).mean(1))


class Cnn(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = torch.nn.Sequential(
            torch.nn.Conv2d(3, 6, 3, padding=1), torch.nn.BatchNorm2d(6), torch.nn.ReLU(), torch.nn.MaxPool2d(2)
        )
        self.classifier = torch.nn.Linear(6 * 16, 5)

    def forward(self, images: Any) -> Any:
        return self.classifier(self.features(images).flatten(1))


class Joint(torch.nn.Module):
    """Attention of PyTorch: one matrix for queries, keys and values, and for another memory parts of it."""

    def __init__(self) -> None:
        super().__init__()
        self.block = torch.nn.TransformerDecoderLayer(8, 2, 12, dropout=0.0, batch_first=True)

    def forward(self, x: Any) -> Any:
        return self.block(x, x.flip(1))


class Shared(torch.nn.Module):
    """Two layers of one matrix, of which one is applied twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.second.weight = self.first.weight

    def forward(self, x: Any) -> Any:
        return self.second(torch.relu(self.first(self.first(x))))


class Recurrent(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = torch.nn.LSTM(8, 6, batch_first=True), torch.nn.Linear(6, 3)

    def forward(self, x: Any) -> Any:
        return self.head(self.rnn(x)[0])


class Case(NamedTuple):
    """A source, its input, the paths of some layers, and the layers that LoRA replaces."""

    load: Callable[[], Any]
    name: str
    example: Any
    paths: set[str]
    adapted: list[str]


IDS = np.random.default_rng(0).integers(0, 20, (2, 6))
IMAGES = np.random.default_rng(0).normal(0, 1, (2, 3, 8, 8)).astype(np.float32)
WORDS = np.random.default_rng(2).normal(0, 1, (2, 6, 8)).astype(np.float32)


def copied(load: Callable[[], Any]) -> Callable[[], Any]:
    """Return a function that gives copies of a model, as PyTorch takes seconds to trace one."""
    loaded = cache(load)
    return lambda: deepcopy(loaded())


def from_torch(module: type, name: str, example: Any) -> Callable[[], Any]:
    def load() -> Any:
        torch.manual_seed(0)
        return ml.from_torch(module(), {name: torch.from_numpy(example)})

    return copied(load)


class Encoder(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings = torch.nn.Embedding(20, 8)
        self.layer = torch.nn.ModuleList([Block(8), Block(8)])
        self.head = torch.nn.Linear(8, 5)

    def forward(self, ids: Any) -> Any:
        x = self.embeddings(ids)
        for block in self.layer:
            x = block(x)
        return self.head(x.mean(1))


def from_onnx(module: type, name: str, example: Any) -> Callable[[], Any]:
    """Return a function that returns the model of a file that PyTorch exports."""

    def load() -> Any:
        pytest.importorskip("mithril_onnx")
        torch.manual_seed(0)
        file = io.BytesIO()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the older exporter, whose nodes are named by scopes, is deprecated
            torch.onnx.export(module().eval(), (torch.from_numpy(example),), file, dynamo=False, input_names=[name])
        return ml.from_onnx(file.getvalue())

    return copied(load)


@copied
def from_keras() -> Any:
    """Return the model of an archive whose block is applied twice."""
    pytest.importorskip("mithril_keras")
    from archives import record

    return ml.from_keras(record("transformer")[0])


def perceptron(params: Any, x: Any) -> Any:
    """Return the results of a function of JAX: the first layer in a named scope, others known by their parameters."""
    import jax

    with jax.named_scope("first"):
        x = x @ params["first"]["kernel"] + params["first"]["bias"]
    for layer in params["layers"]:
        x = jax.nn.relu(x @ layer["kernel"] + layer["bias"])
    return x @ params["head"]["w"]


def from_jax() -> Any:
    pytest.importorskip("mithril_jax")
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return rng.normal(0, 0.5, shape).astype(np.float32)

    first, *layers = ({"kernel": normal(8, 8), "bias": normal(8)} for _ in range(3))
    params = {"first": first, "layers": layers, "head": {"w": normal(8, 3)}}
    return ml.from_jax(perceptron, ROWS, params=params)


ROWS = np.random.default_rng(1).normal(0, 1, (4, 8)).astype(np.float32)
CASES = {
    "jax": Case(from_jax, "x", ROWS, {"first", "layers", "layers.1", "head"}, ["first", "layers.?", "head"]),
    "onnx": Case(
        from_onnx(Encoder, "ids", IDS),
        "ids",
        IDS,
        {"embeddings", "layer.1", "layer.0.attn.c_attn", "layer.1.mlp.2", "head"},
        ["*.c_attn", "*.c_proj", "*.mlp.[02]", "head", "embeddings"],
    ),
    "gpt": Case(
        from_torch(Gpt, "ids", IDS),
        "ids",
        IDS,
        {"wte", "h.0", "h.1.attn", "h.1.attn.c_attn", "h.0.mlp.2", "ln_f", "lm_head"},
        ["h.*.attn.c_attn", "h.0.mlp.[02]", "wte"],
    ),
    "joint": Case(
        from_torch(Joint, "x", WORDS),
        "x",
        WORDS,
        {"block", "block.self_attn", "block.linear1"},
        [f"*_attn:{name}" for name in ("in_proj_weight", "out_proj.weight")] + ["*.linear?"],
    ),
    "joint of onnx": Case(
        from_onnx(Joint, "x", WORDS),
        "x",
        WORDS,
        {"block.self_attn", "block.multihead_attn", "block.linear1"},
        ["*.self_attn", "*_attn:out_proj.weight", "*.multihead_attn:weight_1", "*.multihead_attn:weight_2"],
    ),
    "shared": Case(from_torch(Shared, "x", WORDS), "x", WORDS, {"first", "second"}, ["first"]),
    "shared of onnx": Case(from_onnx(Shared, "x", WORDS), "x", WORDS, {"first", "second"}, ["first"]),
    "recurrent": Case(
        from_torch(Recurrent, "x", WORDS),
        "x",
        WORDS,
        {"rnn", "head"},
        ["rnn:weight_ih_l0", "rnn:weight_hh_l0", "head"],
    ),
    "keras": Case(
        from_keras,
        "tokens",
        IDS[:, :5] % 7,
        {"block.multi_head_attention", "head.dense"},
        [f"*attention:{n}.kernel" for n in ("query", "key", "value", "attention_output")]
        + ["block.einsum_dense:kernel", "head.dense:kernel", "head.dense_1"],
    ),
    "vit": Case(
        from_torch(Vit, "images", IMAGES),
        "images",
        IMAGES,
        {"patch", "blocks", "blocks.1.attn.c_proj", "head"},
        ["*.c_attn", "patch", "head"],
    ),
    "cnn": Case(
        from_torch(Cnn, "images", IMAGES),
        "images",
        IMAGES,
        {"features", "features.0", "features.1", "features.3", "classifier"},
        ["features.0", "classifier"],
    ),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))


def output(model: Any, case: Case, backend: str = "numpy", params: Any = None) -> Any:
    compiled = ml.compile(model, backend, inference=True)
    compiled = compiled if params is None else compiled.bind(params)
    return np.asarray(compiled.backend.to_numpy(next(iter(compiled({case.name: case.example}).values()))))


@each_case
def test_layers_have_the_paths_of_the_source(case: Case) -> None:
    model = case.load()
    assert case.paths <= set(dict(model.walk()))
    assert all(path.rpartition(".")[2] in model.summary() for path in case.paths)


@pytest.mark.parametrize("backend", ["numpy", *(pytest.param(b, marks=pytest.mark.soak) for b in ("torch", "jax"))])
@each_case
def test_imported_layers_are_trained_merged_and_exported(case: Case, backend: str, tmp_path: Path) -> None:
    pytest.importorskip("mithril_onnx")
    inputs = {case.name: case.example}
    train_merge_and_write(case.load(), case.adapted, inputs, backend, tmp_path, {"onnx": {}})


def gradients_of(model: Any, case: Case) -> set[str]:
    compiled = ml.compile(model, "numpy", shapes={case.name: case.example.shape})
    params, inputs = compiled.randomize_params(seed=0), {case.name: case.example}
    results = compiled.evaluate(params, inputs)
    return set(compiled.evaluate(params, inputs, output_gradients=dict(results))[1])


def test_partial_freezing() -> None:
    case = CASES["gpt"]
    model = case.load().freeze("h.0", "w?e", "h.1.mlp.0.bias")
    trained = gradients_of(model, case)
    assert "h.1.mlp.0.weight" in trained
    assert trained == {n for n in gradients_of(case.load(), case) if n.startswith(("h.1.", "ln_f"))} - {
        "h.1.mlp.0.bias"
    }
    assert ml.compile(model, "numpy", trainable=["h.*"]).graph is not None
    with pytest.raises(ml.OptionError, match="'h.7' in freeze matches no parameter or layer"):
        ml.compile(case.load().freeze("h.7"), "numpy", shapes={"ids": IDS.shape})
    with pytest.raises(ml.ModelError, match="requires a pattern"):
        model.freeze()


def test_a_head_of_another_size_replaces_that_of_the_source() -> None:
    case = CASES["cnn"]
    model = case.load().freeze("features")
    model.replace("classifier", Linear(96, 3))
    compiled = ml.compile(model, "numpy", shapes={"images": IMAGES.shape})
    params = compiled.randomize_params(seed=0)
    assert params["classifier.weight"].shape == (3, 96)
    assert compiled.evaluate(params, {"images": IMAGES})["output"].shape == (2, 3)
    assert gradients_of(model, case) == {"classifier.weight", "classifier.bias"}


def test_adapters_hooks_and_inner_outputs() -> None:
    case = CASES["vit"]
    plain, model = output(case.load(), case), case.load()
    model.replace("blocks.?", Adapter(4))
    np.testing.assert_allclose(output(model, case), plain, rtol=1e-5, atol=1e-6)  # an adapter starts at 0
    assert gradients_of(model.freeze("*.weight", "*.bias"), case) == {
        f"blocks.{k}.adapter_{side}" for k in range(2) for side in ("up", "down")
    }
    model = case.load()
    compiled = ml.compile(model, "numpy", outputs=["blocks.0", "blocks.1.attn"], inference=True)
    values = compiled({"images": IMAGES})
    assert {n: y.shape for n, y in values.items()} == {"blocks.0": (2, 4, 8), "blocks.1.attn": (2, 4, 8)}
    model.replace("head", hook(lambda y: y * 2.0))
    np.testing.assert_allclose(output(model, case), 2 * plain, rtol=1e-5)


class Gate(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: Any, gate: Any) -> Any:
        return self.linear(x) * gate, gate + 1


class Gated(torch.nn.Module):
    """A block of two values, and a layer that is applied twice."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.again = Gate(), torch.nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        a, b = self.gate(x, x * 2)
        return self.again(self.again(a)) + b


def test_the_error_of_replace_names_the_values_that_cross_the_border() -> None:
    x = np.ones((2, 4), np.float32)
    model = from_torch(Gated, "x", x)()
    with pytest.raises(ml.ModelError, match="'gate' cannot be replaced") as caught:
        model.replace("gate", Linear(4, 4))
    assert "it reads 'x', 'mul', and others read its" in str(caught.value)
    case = Case(lambda: model, "x", x, set(), [])
    plain = output(model, case)
    model.replace("again", LoRA(rank=2))
    np.testing.assert_allclose(output(model, case), plain, rtol=1e-5)
    model.replace("again", Linear(4, 4))
    assert gradients_of(model, case) == {f"{p}.{n}" for p in ("again", "gate.linear") for n in ("weight", "bias")}


def test_a_copy_has_layers_of_its_own() -> None:
    case = CASES["gpt"]
    model = case.load()
    copy = deepcopy(model)
    copy.replace("h.0.mlp.0", LoRA(rank=2))
    assert not adapter_layers(model)
    assert len(adapter_layers(copy)) == 1
    np.testing.assert_allclose(output(copy, case), output(model, case), rtol=1e-5, atol=1e-6)


def adapter_layers(model: Any) -> list[str]:
    return [path for path, layer in model.walk() if type(layer).__name__ == "LowRankLinear"]
