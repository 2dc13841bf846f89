"""The models that the backends' benchmarks share: in mithril, and typed by hand for any framework.

A framework gives its own way to write ``linear``, ``attention`` and the like; the rest is as anybody would type it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from interleaved import interleaved, table

import mithril as ml
from mithril.models import (
    BatchNorm2d,
    Conv2d,
    IOKey,
    Linear,
    Model,
    Relu,
    TransformerEncoder,
    TransformerEncoderLayer,
)

RNG = np.random.default_rng(0)
Params = Mapping[str, Any]


@dataclass
class Case:
    """A model, the shape of its input, and the same function by hand of a framework, parameters and the input."""

    model: Model
    shape: tuple[int, ...]
    by_hand: Callable[[Any, Params, Any], Any]
    state: Mapping[str, Any] | None = None


def mlp(batch: int) -> Case:
    model = Model()
    for k, size in enumerate((512, 512, 10)):
        model += Linear(size, name=f"l{k}")
        if k < 2:
            model += Relu()

    def by_hand(f: Any, p: Params, x: Any) -> Any:
        for k in range(2):
            x = f.relu(f.linear(x, p[f"l{k}.weight"], p[f"l{k}.bias"]))
        return f.linear(x, p["l2.weight"], p["l2.bias"])

    return Case(model, (batch, 784), by_hand)


def _attention(f: Any, p: Params, name: str, x: Any, heads: int, causal: bool) -> Any:
    b, n, d = x.shape

    def projected(part: str) -> Any:
        y = f.linear(x, p[f"{name}.{part}.weight"], p[f"{name}.{part}.bias"])
        return f.transpose(y.reshape(b, n, heads, d // heads), (0, 2, 1, 3))

    y = f.attention(projected("query"), projected("key"), projected("value"), causal)
    y = f.transpose(y, (0, 2, 1, 3)).reshape(b, n, d)
    return f.linear(y, p[f"{name}.output.weight"], p[f"{name}.output.bias"])


def _norm(f: Any, p: Params, name: str, x: Any) -> Any:
    return f.layer_norm(x, p[f"{name}.weight"], p[f"{name}.bias"])


def encoder(layers: int, features: int, heads: int, batch: int, length: int) -> Case:
    model = Model()
    model |= TransformerEncoder(layers, features, heads, dropout=0.0, activation="gelu", name="e")(
        input="input", output="output"
    )

    def by_hand(f: Any, p: Params, x: Any) -> Any:
        for k in range(layers):
            at = f"e.layers.{k}"
            x = _norm(f, p, f"{at}.norm1", x + _attention(f, p, f"{at}.self_attn", x, heads, False))
            h = f.gelu(f.linear(x, p[f"{at}.linear1.weight"], p[f"{at}.linear1.bias"]))
            x = _norm(f, p, f"{at}.norm2", x + f.linear(h, p[f"{at}.linear2.weight"], p[f"{at}.linear2.bias"]))
        return x

    return Case(model, (batch, length, features), by_hand)


def gpt_block(features: int, heads: int, batch: int, length: int) -> Case:
    model = Model()
    layer = TransformerEncoderLayer(
        features, heads, dropout=0.0, activation="gelu", norm_first=True, causal=True, name="b"
    )
    model |= layer(input="input", output="output")

    def by_hand(f: Any, p: Params, x: Any) -> Any:
        x = x + _attention(f, p, "b.self_attn", _norm(f, p, "b.norm1", x), heads, True)
        h = f.gelu(f.linear(_norm(f, p, "b.norm2", x), p["b.linear1.weight"], p["b.linear1.bias"]))
        return x + f.linear(h, p["b.linear2.weight"], p["b.linear2.bias"])

    return Case(model, (batch, length, features), by_hand)


def resnet_block(channels: int, batch: int, size: int) -> Case:
    """With convolutions that have a bias in place of batch norms, so that forward and gradients are one program."""
    x = IOKey("input")
    h = Relu()(Conv2d(channels, channels, kernel_size=3, padding=1, name="conv1")(x))
    h = Conv2d(channels, channels, kernel_size=3, padding=1, name="conv2")(h)
    model = Model.create(inputs=x, outputs=Relu()(h + x), name="block")

    def by_hand(f: Any, p: Params, x: Any) -> Any:
        h = f.relu(f.conv(x, p["conv1.weight"], p["conv1.bias"]))
        return f.relu(f.conv(h, p["conv2.weight"], p["conv2.bias"]) + x)

    return Case(model, (batch, channels, size, size), by_hand)


def resnet_inference(channels: int, batch: int, size: int) -> Case:
    """With batch norms by running statistics."""
    x = IOKey("input")
    h = Conv2d(channels, channels, kernel_size=3, padding=1, bias=False, name="conv1")(x)
    h = Relu()(BatchNorm2d(channels, name="bn1")(h))
    h = Conv2d(channels, channels, kernel_size=3, padding=1, bias=False, name="conv2")(h)
    model = Model.create(inputs=x, outputs=Relu()(BatchNorm2d(channels, name="bn2")(h) + x), name="block")

    def by_hand(f: Any, p: Params, x: Any) -> Any:
        def norm(name: str, x: Any) -> Any:
            return f.batch_norm(x, *(p[f"{name}.{part}"] for part in ("running_mean", "running_var", "weight", "bias")))

        h = f.relu(norm("bn1", f.conv(x, p["conv1.weight"], None)))
        return f.relu(norm("bn2", f.conv(h, p["conv2.weight"], None)) + x)

    return Case(model, (batch, channels, size, size), by_hand)


CASES: dict[str, Callable[[], Case]] = {
    "MLP 784-512-512-10, batch 1": lambda: mlp(1),
    "MLP, batch 32": lambda: mlp(32),
    "MLP, batch 256": lambda: mlp(256),
    "encoder layer 384, 12 heads, 128": lambda: encoder(1, 384, 12, 1, 128),
    "encoder, 6 layers": lambda: encoder(6, 384, 12, 1, 128),
    "GPT block 256, 8 heads, 4x64": lambda: gpt_block(256, 8, 4, 64),
    "ResNet block 64, 4x28x28": lambda: resnet_block(64, 4, 28),
}
FORWARD_ONLY = {"ResNet block, batch norms": lambda: resnet_inference(64, 4, 28)}

# How a framework runs one function of (params, input): name -> what makes it of a case's function.
Ways = Mapping[str, Callable[[Callable[[Params, Any], Any]], Callable[[Params, Any], Any]]]


def run(
    backend: str,
    f: Any,
    forward: Ways,
    gradients: Ways,
    finish: Callable[[Any], Any],
    chosen: list[str],
    options: Mapping[str, Mapping[str, Any]],
    seconds: float = 2.0,
) -> None:
    """Both tables. ``options`` name the ways mithril is compiled; ``finish`` waits for results."""
    made = {**CASES, **FORWARD_ONLY}
    names = [n for n in made if not chosen or any(word in n for word in chosen)]
    rows = {n: forward_row(backend, f, made[n](), forward, finish, options, seconds) for n in names}
    table(f"forward, {backend}", rows, "by hand")
    print()
    rows = {n: gradient_row(backend, f, made[n](), gradients, finish, options, seconds) for n in names if n in CASES}
    table(f"with gradients, {backend}", rows, "by hand")


def _random(shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return RNG.standard_normal(shape).astype(np.float32)


def _joined(made: Any) -> dict[str, Any]:
    """Gradients by parameter, and the output, which every way has to give as well, under no name."""
    outputs, gradients = made
    return {**gradients, "": next(iter(outputs.values()))}


def forward_row(
    backend: str,
    f: Any,
    case: Case,
    ways: Ways,
    finish: Callable[[Any], Any],
    options: Mapping[str, Mapping[str, Any]],
    seconds: float,
) -> dict[str, float]:
    calls: dict[str, Callable[[], Any]] = {}
    expected = None
    for label, chosen in options.items():
        compiled = ml.compile(case.model, backend, shapes={"input": list(case.shape)}, inference=True, **chosen)
        params = compiled.randomize_params(0)
        x = compiled.backend.array(_random(case.shape) if expected is None else expected[0])
        if expected is None:
            expected = (compiled.backend.to_numpy(x).copy(), params, {**params, **compiled.initial_state()}, compiled)
        calls[label] = lambda compiled=compiled, params=params, x=x: finish(
            next(iter(compiled.evaluate(params, {"input": x}).values()))
        )
    assert expected is not None
    for label, way in ways.items():
        function, p = way(lambda p, x: case.by_hand(f, p, x)), expected[2]
        calls[label] = lambda function=function, p=p, x=x: finish(function(p, x))
    check = expected[3].backend.to_numpy
    for label, call in calls.items():
        np.testing.assert_allclose(
            check(call()), check(next(iter(calls.values()))()), rtol=1e-2, atol=1e-3, err_msg=label
        )
    return interleaved(dict(reversed(calls.items())), seconds)


def gradient_row(
    backend: str,
    f: Any,
    case: Case,
    ways: Ways,
    finish: Callable[[Any], Any],
    options: Mapping[str, Mapping[str, Any]],
    seconds: float,
) -> dict[str, float]:
    calls: dict[str, Callable[[], Any]] = {}
    x = y = None
    for label, chosen in options.items():
        compiled = ml.compile(case.model, backend, shapes={"input": list(case.shape)}, **chosen)
        params = compiled.randomize_params(0)
        if x is None:
            x = compiled.backend.array(_random(case.shape))
            y = compiled.backend.array(
                _random(tuple(next(iter(compiled.evaluate(params, {"input": x}).values())).shape))
            )
        calls[label] = lambda compiled=compiled, params=params: _joined(
            finish(compiled.evaluate(params, {"input": x}, y))
        )
    for label, way in ways.items():
        function = way(lambda p, x: case.by_hand(f, p, x))
        calls[label] = lambda function=function, params=params: finish(function(params, (x, y)))
    convert = compiled.backend.to_numpy
    expected = {n: convert(g) for n, g in next(iter(calls.values()))().items()}
    scale = max(float(np.abs(g).max()) for g in expected.values())  # the gradient of a key's bias is 0 but for noise
    for label, call in calls.items():
        for name, g in call().items():
            np.testing.assert_allclose(convert(g) / scale, expected[name] / scale, atol=2e-3, err_msg=f"{label} {name}")
    return interleaved(dict(reversed(calls.items())), seconds)
