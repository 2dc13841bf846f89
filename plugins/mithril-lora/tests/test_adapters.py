"""LoRA and adapters: models start unchanged, train only the added parameters, and merge to the same function."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mithril as ml
from mithril.models import LSTM, Conv2d, Embedding, Layer, Linear, Model, Relu, TransformerEncoder, shared_parameter
from mithril_lora import Adapter, LoRA, adapter_parameters, adapter_patterns, merge

generator = np.random.default_rng(3)


@pytest.mark.parametrize("replacement", [LoRA(rank=2, alpha=3.0), LoRA(rank=2, target="weight"), Adapter(4)], ids=repr)
@pytest.mark.parametrize("layer", [Linear(5), Conv2d(3, 5, 3)], ids=repr)
def test_model_with_adapters_returns_from_its_file(layer, replacement):
    model = Model(layer, Relu())
    model.replace(type(layer), replacement)
    again = Model.from_json(model.to_json())
    assert again.to_json() == model.to_json()
    assert repr(dict(again.walk())) == repr(dict(model.walk()))


def draw(*shape: int) -> Any:
    return generator.normal(size=shape).astype(np.float32)


def output(model: Layer, params: Any, x: Any) -> Any:
    compiled = ml.compile(model, "numpy", shapes={"input": list(x.shape)}, inference=True)
    return compiled, next(iter(compiled.evaluate(params, {"input": x}).values()))


def initial(model: Layer, x: Any) -> Any:
    return ml.compile(model, "numpy", shapes={"input": list(x.shape)}).randomize_params(seed=1)


class Transposed(Linear):
    """A linear layer whose weight is [in, out], and has another name."""

    weight_name, input_major = "kernel", True

    def build(self, x: Any) -> Any:
        return x @ self.param("kernel", (x.shape[-1], self.out_features), "normal")


class Tied(Layer):
    """Two layers of one matrix: the second uses that of the first."""

    def __init__(self, kind: type[Linear] = Linear) -> None:
        self.first = kind(3, 3)

    def build(self, x: Any) -> Any:
        y = self.first(x)
        inner = self.first if isinstance(self.first, Linear) else self.first.inner
        w = shared_parameter(self.first, inner.weight_name, (3, 3))
        return y @ w


def test_several_matrices_of_a_layer() -> None:
    model, x = Model(LSTM(3, 4)), draw(2, 3, 3)
    for target in ("weight_ih_l0", "weight_hh_l0"):
        model.replace("lstm", LoRA(rank=2, target=target))
    params = {n: draw(*np.shape(v)) for n, v in initial(model, x).items()}
    assert len(adapter_parameters(params)) == 4
    _, changed = output(model, params, x)
    merged = merge(model, params)
    assert type(model.find("lstm")["lstm"]) is LSTM
    np.testing.assert_allclose(output(model, merged, x)[1], changed, rtol=2e-4, atol=1e-4)


CASES: dict[str, Any] = {
    "transposed": (lambda: Model(Transposed(4, 4)), Linear, LoRA(rank=2), draw(5, 4)),
    "kernel": (lambda: Model(Transposed(4, 4)), Linear, LoRA(rank=2, target="kernel"), draw(5, 4)),
    "tied": (lambda: Model(Tied()), "*.first", LoRA(rank=2), draw(5, 3)),
    "tied transposed": (lambda: Model(Tied(Transposed)), "*.first", LoRA(rank=2), draw(5, 3)),
    "linear": (lambda: Model(Linear(4), Relu(), Linear(3)), Linear, LoRA(rank=2, alpha=6), draw(5, 3)),
    "attention": (lambda: TransformerEncoder(2, 8, heads=2), "*.self_attn.query", LoRA(rank=2), draw(2, 3, 8)),
    "conv": (lambda: Model(Conv2d(2, 4, kernel_size=3)), Conv2d, LoRA(rank=2), draw(1, 2, 5, 5)),
    "lstm": (lambda: Model(LSTM(3, 4)), LSTM, LoRA(rank=2, target="weight_hh_l0"), draw(2, 3, 3)),
    "embedding": (lambda: Model(Embedding(7, 4)), Embedding, LoRA(rank=2), np.array([[1, 2], [6, 0]], np.int32)),
}


@pytest.mark.parametrize("name", CASES)
def test_starts_unchanged_and_merges(name: str) -> None:
    create, target, lora, x = CASES[name]
    model = create()
    weights = initial(model, x)
    _, before = output(model, weights, x)
    adapted = create().replace(target, lora)
    params = initial(adapted, x)
    added = adapter_parameters(params)
    assert set(params) == set(weights) | set(added)
    assert len(added) == 2 * len(model.find(target))
    params |= weights
    np.testing.assert_array_equal(output(adapted, params, x)[1], before)
    params |= {n: draw(*np.shape(v)) for n, v in added.items()}
    _, changed = output(adapted, params, x)
    assert np.abs(changed - before).max() > 1e-3
    merged = merge(adapted, params)
    assert set(merged) == set(weights)
    np.testing.assert_allclose(output(adapted, merged, x)[1], changed, rtol=2e-4, atol=1e-4)


def test_only_added_parameters_have_gradients() -> None:
    model = Model(Linear(4), Relu(), Linear(3)).replace("linear*", LoRA(rank=2)).replace("relu", Adapter(2))
    x = draw(5, 3)
    compiled = ml.compile(model, "numpy", shapes={"input": [5, 3]}, trainable=adapter_patterns(model))
    params = compiled.randomize_params(seed=0)
    _, gradients = compiled.evaluate(params, {"input": x}, output_gradients={"output": np.ones((5, 3), np.float32)})
    assert set(gradients) == set(adapter_parameters(params))
    assert any(name.endswith("adapter_up") for name in gradients)
    assert all(np.abs(gradients[n]).max() > 0 for n in gradients if n.endswith(("lora_b", "adapter_up")))


@pytest.mark.parametrize(("layer", "target"), [(Linear(4), "weight"), (Transposed(3, 4), "kernel")], ids=repr)
def test_dropout_applies_in_training_only(layer: Linear, target: str) -> None:
    model, x = Model(layer).replace(Linear, LoRA(rank=2, dropout=0.5, target=target)), draw(64, 3)
    compiled = ml.compile(model, "numpy", shapes={"input": [64, 3]})
    params = {n: draw(*np.shape(v)) for n, v in compiled.randomize_params().items()}
    plain = compiled.evaluate(params, {"input": x})["output"]
    state = compiled.initial_state()
    trained, _ = compiled.evaluate(params, {"input": x}, state=state, training=True)
    assert np.abs(trained["output"] - plain).max() > 0.1


MISTAKES = {
    "rank=0 is not a positive integer": lambda: LoRA(rank=0),
    "dropout=1.5 is not a probability": lambda: LoRA(dropout=1.5),
    "size=0 is not a positive integer": lambda: Adapter(0),
    "unknown activation 'rleu'": lambda: Adapter(2, activation="rleu"),
    "supports Linear layers only": lambda: LoRA(dropout=0.1)(Conv2d(2, kernel_size=3)),
    "has no LoRA and no adapters": lambda: adapter_patterns(Model(Linear(2))),
    "has no LoRA to merge": lambda: merge(Model(Linear(2)), {}),
    "has no parameter 'kernel'": lambda: Model(LoRA(target="kernel")(Linear(2)))(draw(2, 2)),
    "LoRA adds to matrices": lambda: Model(LoRA(target="bias")(Linear(2)))(draw(2, 2)),
}


@pytest.mark.parametrize("message", MISTAKES)
def test_mistakes(message: str) -> None:
    with pytest.raises(ml.ModelError, match=message):
        MISTAKES[message]()


def test_only_public_interfaces_are_imported() -> None:
    from mithril_lora import adapters

    lines = Path(adapters.__file__).read_text().splitlines()
    assert {line.split()[1] for line in lines if line.startswith("from mithril")} == {
        "mithril",
        "mithril.backend",
        "mithril.models",
    }


def test_readme() -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text()
    exec(compile(text.split("```python\n")[1].split("```")[0], "README.md", "exec"), {})


def test_a_connected_weight_is_adapted_in_its_layer_and_cannot_be_merged():
    table = ml.IOKey("table", shape=(7, 4), trainable=True)
    model = Model()
    model |= Linear(4)(input="input", output="h")
    model |= Linear(7, bias=False, name="head")(input="h", weight=table, output="output")
    x = draw(3, 5)
    expected = output(model, initial(model, x), x)[1]
    model.replace("head", LoRA(rank=2))
    params = initial(model, x)
    np.testing.assert_allclose(output(model, params, x)[1], expected, rtol=1e-5)
    assert {"table", "head.lora_a", "head.lora_b"} < set(params)
    with pytest.raises(ml.ModelError) as caught:
        merge(model, params)
    assert str(caught.value) == (
        "parameter 'head.weight' is missing\n  parameters of 'head'\n"
        "hint: pass the parameters of the model; a weight that is an input of its layer cannot be merged"
    )
