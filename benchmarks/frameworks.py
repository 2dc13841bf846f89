"""The models that the backends' benchmarks share: in mithril, and typed by hand for any framework.

A framework supplies its own ``linear``, ``attention`` and similar functions; the rest is idiomatic code.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from interleaved import interleaved, table
from resnet18 import resnet18

import mithril as ml
from mithril.models import Linear, Model, Relu, TransformerEncoder, TransformerEncoderLayer

RNG = np.random.default_rng(0)
Params = Mapping[str, Any]
ROUNDS = 8  # at least, of ways that take long


@dataclass
class Case:
    """A model, the shape of its input, and the same function by hand of a framework, parameters and the input."""

    model: Model
    shape: tuple[int, ...]
    by_hand: Callable[[Any, Params, Any], Any]


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
            prefix = f"e.layers.{k}"
            x = _norm(f, p, f"{prefix}.norm1", x + _attention(f, p, f"{prefix}.self_attn", x, heads, False))
            h = f.gelu(f.linear(x, p[f"{prefix}.linear1.weight"], p[f"{prefix}.linear1.bias"]))
            x = _norm(
                f, p, f"{prefix}.norm2", x + f.linear(h, p[f"{prefix}.linear2.weight"], p[f"{prefix}.linear2.bias"])
            )
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


def resnet(batch: int, size: int = 64) -> Case:
    """ResNet-18 on square images, batch norms by running statistics; by hand with channels where the framework says."""

    def block(f: Any, p: Params, prefix: str, x: Any, stride: int) -> Any:
        def norm(name: str, x: Any) -> Any:
            return _batch_norm(f, p, f"{prefix}.{name}", x)

        h = f.relu(norm("bn1", f.conv(x, p[f"{prefix}.conv1.weight"], stride, 1)))
        h = norm("bn2", f.conv(h, p[f"{prefix}.conv2.weight"], 1, 1))
        if f"{prefix}.downsample.0.weight" in p:
            x = norm("downsample.1", f.conv(x, p[f"{prefix}.downsample.0.weight"], stride, 0))
        return f.relu(h + x)

    def by_hand(f: Any, p: Params, x: Any) -> Any:
        x = f.relu(_batch_norm(f, p, "bn1", f.conv(x, p["conv1.weight"], 2, 3)))
        x = f.max_pool(x)
        for stage in range(1, 5):
            for k in range(2):
                x = block(f, p, f"layer{stage}.{k}", x, 2 if stage > 1 and k == 0 else 1)
        return f.linear(x.mean(getattr(f, "image_axes", (2, 3))), p["fc.weight"], p["fc.bias"])

    return Case(resnet18(), (batch, 3, size, size), by_hand)


def _batch_norm(f: Any, p: Params, prefix: str, x: Any) -> Any:
    return f.batch_norm(x, *(p[f"{prefix}.{part}"] for part in ("running_mean", "running_var", "weight", "bias")))


CASES: dict[str, Callable[[], Case]] = {
    "MLP 784-512-512-10, batch 1": lambda: mlp(1),
    "MLP, batch 32": lambda: mlp(32),
    "MLP, batch 256": lambda: mlp(256),
    "encoder layer 384, 12 heads, 128": lambda: encoder(1, 384, 12, 1, 128),
    "encoder, 6 layers": lambda: encoder(6, 384, 12, 1, 128),
    "GPT block 256, 8 heads, 4x64": lambda: gpt_block(256, 8, 4, 64),
    "ResNet-18, 1 x 64x64": lambda: resnet(1),
    "ResNet-18, 8 x 64x64": lambda: resnet(8),
}

# How a framework runs one function of (params, input): name -> function that wraps the function of a case.
Ways = Mapping[str, Callable[[Callable[[Params, Any], Any]], Callable[[Params, Any], Any]]]


def run(
    backend: str,
    f: Any,
    forward: Ways,
    gradients: Ways,
    finish: Callable[[Any], Any],
    selection: list[str],
    options: Mapping[str, Mapping[str, Any]],
    seconds: float = 2.0,
) -> None:
    """Print both tables. ``options`` holds compile options by label; ``finish`` waits for results."""
    _keep_memory()
    names = [n for n in CASES if not selection or any(word in n for word in selection)]
    rows = {n: forward_row(backend, f, CASES[n](), forward, finish, options, seconds) for n in names}
    table(f"forward, {backend}", rows, "by hand")
    print()
    rows = {n: gradient_row(backend, f, CASES[n](), gradients, finish, options, seconds) for n in names}
    table(f"with gradients, {backend}", rows, "by hand")


COLD = """
import sys, time
sys.path.insert(0, sys.argv[1])
from frameworks import CASES
import numpy as np, mithril as ml
case = CASES[sys.argv[2]]()
x = {"input": np.ones(case.shape, np.float32)}
params = ml.compile(case.model, "numpy", shapes={"input": list(case.shape)}).randomize_params(0)
backend = getattr(ml, sys.argv[3])()
params = {name: backend.array(p) for name, p in params.items()}
backend.synchronize(params)
start = time.perf_counter()
options = {"shapes": {"input": list(case.shape)}, "cache": True, "cache_dir": sys.argv[4], **eval(sys.argv[5])}
compiled = ml.compile(case.model, backend, **options)
y = compiled.evaluate(params, x)
backend.synchronize(compiled.evaluate(params, x, y))
print(time.perf_counter() - start)
"""


def cold(backend: str, *variants: Mapping[str, Any], case: str = "encoder, 6 layers", processes: int = 3) -> None:
    """Seconds from ``ml.compile`` to the first outputs and gradients: with an empty cache, and in later processes."""
    name = {"jax": "JaxBackend", "torch": "TorchBackend"}[backend]
    for options in variants:
        first, later = [], []
        for _ in range(processes):
            with tempfile.TemporaryDirectory() as folder:
                command = [sys.executable, "-W", "ignore", "-c", COLD, str(Path(__file__).parent), case, name, folder]
                environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": f"{folder}/elsewhere"}
                for times in (first, later):
                    done = subprocess.run(
                        [*command, repr(dict(options))], env=environment, check=True, capture_output=True, text=True
                    )
                    times.append(float(done.stdout))
        title = f"{backend}{', ' if options else ''}{', '.join(f'{n}={v}' for n, v in options.items())}, {case}"
        ratio = min(first) / min(later)
        print(f"{title}: first process {min(first):.2f} s, second {min(later):.2f} s: {ratio:.1f}x", flush=True)


def _keep_memory() -> None:
    """Keep freed memory in the process: page faults hit variants at random and cost up to a fifth of their time."""
    if sys.platform.startswith("linux"):
        libc = ctypes.CDLL("libc.so.6")
        trim_threshold, mmap_threshold, largest = -1, -3, 1 << 25
        libc.mallopt(mmap_threshold, largest)
        libc.mallopt(trim_threshold, 1 << 30)


def _random(shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return RNG.standard_normal(shape).astype(np.float32)


def _joined(result: Any) -> dict[str, Any]:
    """Gradients by parameter, and the output, which every way has to give as well, under no name."""
    outputs, gradients = result
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
    for label, settings in options.items():
        compiled = ml.compile(case.model, backend, shapes={"input": list(case.shape)}, inference=True, **settings)
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
    return interleaved(dict(reversed(calls.items())), seconds, ROUNDS, time.process_time)


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
    x = y = state = slopes = None
    for label, settings in options.items():
        compiled = ml.compile(case.model, backend, shapes={"input": list(case.shape)}, **settings)
        params = compiled.randomize_params(0)
        if x is None:
            x = compiled.backend.array(_random(case.shape))
            (name, output) = next(iter(compiled.evaluate(params, {"input": x}).items()))
            y = compiled.backend.array(_random(tuple(output.shape)))
            slopes, state = {name: y}, compiled.initial_state()
        calls[label] = lambda compiled=compiled, params=params: _joined(
            finish(compiled.evaluate(params, {"input": x}, slopes, training=False))
        )
    for label, way in ways.items():
        function = way(lambda p, x: case.by_hand(f, {**state, **p}, x))
        calls[label] = lambda function=function, params=params: finish(function(params, (x, y)))
    convert = compiled.backend.to_numpy
    expected = {n: convert(g) for n, g in next(iter(calls.values()))().items()}
    scale = max(float(np.abs(g).max()) for g in expected.values())  # the gradient of a key's bias is 0 but for noise
    for label, call in calls.items():
        for name, g in call().items():
            np.testing.assert_allclose(convert(g) / scale, expected[name] / scale, atol=2e-3, err_msg=f"{label} {name}")
    return interleaved(dict(reversed(calls.items())), seconds, ROUNDS, time.process_time)
