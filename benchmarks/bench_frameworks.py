"""Generated programs against the same models, typed by hand for the framework: forward, then outputs and gradients.

``python benchmarks/bench_frameworks.py jax [words of the rows]``, or ``torch``, ``mlx``, ``numpy``: microseconds of
processor time on one thread, the best of many interleaved rounds. ``--compile`` adds torch.compile or mx.compile around
the code by hand, and ``jit=True``. NumPy has no gradients by hand; its row ``generated`` is the program without the
call around it. On Linux, MLX shows mithril's overhead, not Apple's hardware.
"""

from __future__ import annotations

import ctypes
import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

import harness
import numpy as np
from models import CASES, NUMPY_CASES, Case, random

import mithril as ml

ROUNDS = 8  # at least, of ways that take long
Options = Mapping[str, Mapping[str, Any]]
Calls = dict[str, Callable[[], Any]]


def keep_memory() -> None:
    """Keep freed memory in the process: page faults hit variants at random and cost up to a fifth of their time."""
    if sys.platform.startswith("linux"):
        libc = ctypes.CDLL("libc.so.6")
        trim_threshold, mmap_threshold, largest = -1, -3, 1 << 25
        libc.mallopt(mmap_threshold, largest)
        libc.mallopt(trim_threshold, 1 << 30)


def forward(backend: str, hand: Any, ways: Mapping[str, Any], case: Case, options: Options) -> dict[str, float]:
    calls: Calls = {}
    x: Any = None
    for label, settings in options.items():
        compiled = ml.compile(case.model, backend, shapes={"input": list(case.shape)}, inference=True, **settings)
        params = compiled.randomize_params(0)
        if x is None:
            x, values = compiled.backend.array(random(*case.shape)), {**params, **compiled.initial_state()}
        calls[label] = lambda compiled=compiled, params=params: hand.finish(
            next(iter(compiled.evaluate(params, {"input": x}).values()))
        )
    if backend == "numpy":
        bare = compiled.programs[0].executable.forward
        inputs = {"input": x, **compiled.initial_state()}
        calls["generated"] = lambda: next(iter(bare(params, inputs).values()))
    for label, way in ways.items():
        function = way(lambda p, x: case.by_hand(hand.Hand, p, x))
        calls[label] = lambda function=function: hand.finish(function(values, x))
    check = compiled.backend.to_numpy
    expected = check(next(iter(calls.values()))()).copy()
    for label, call in calls.items():
        np.testing.assert_allclose(check(call()), expected, rtol=1e-2, atol=1e-3, err_msg=label)
    return harness.interleaved(dict(reversed(calls.items())), 2.0, ROUNDS)


def gradients(backend: str, hand: Any, ways: Mapping[str, Any], case: Case, options: Options) -> dict[str, float]:
    """Measure gradients by parameter, and the output, which every way has to give as well, under no name."""
    calls: Calls = {}
    x: Any = None
    for label, settings in options.items():
        compiled = ml.compile(case.model, backend, shapes={"input": list(case.shape)}, **settings)
        params = compiled.randomize_params(0)
        if x is None:
            x = compiled.backend.array(random(*case.shape))
            (name, output) = next(iter(compiled.evaluate(params, {"input": x}).items()))
            y = compiled.backend.array(random(*output.shape))
            slopes, state = {name: y}, compiled.initial_state()

        def call(compiled: Any = compiled, params: Any = params) -> dict[str, Any]:
            outputs, gradients = hand.finish(compiled.evaluate(params, {"input": x}, slopes, training=False))
            return {**gradients, "": next(iter(outputs.values()))}

        calls[label] = call
    for label, way in ways.items():
        function = way(lambda p, x: case.by_hand(hand.Hand, {**state, **p}, x))
        calls[label] = lambda function=function, params=params: hand.finish(function(params, (x, y)))
    convert = compiled.backend.to_numpy
    expected = {n: convert(g) for n, g in next(iter(calls.values()))().items()}
    scale = max(float(np.abs(g).max()) for g in expected.values())  # the gradient of a key's bias is 0 but for noise
    for label, call in calls.items():
        for name, g in call().items():
            np.testing.assert_allclose(convert(g) / scale, expected[name] / scale, atol=2e-3, err_msg=f"{label} {name}")
    return harness.interleaved(dict(reversed(calls.items())), 2.0, ROUNDS)


def main() -> None:
    settings = harness.arguments(__doc__, "ENGINE [WORD]", compile=False)
    backend, *words = settings.words or [""]
    keep_memory()
    for name in [backend] if backend else ("numpy", "jax", "torch", "mlx"):
        measure(name, words, settings.compile)


def measure(backend: str, words: list[str], compiles: bool) -> None:
    """Print both tables of an engine."""
    hand = importlib.import_module(f"hand_{backend}")
    options: dict[str, dict[str, Any]] = {"mithril": {}}
    by_hand = {"forward": dict(hand.FORWARD), "with gradients": dict(hand.GRADIENTS)}
    if compiles:
        options["mithril, jit"] = {"jit": True}
        for name, (of_forward, of_gradients) in hand.COMPILED.items():
            by_hand["forward"][name], by_hand["with gradients"][name] = of_forward, of_gradients
    cases = harness.selected(NUMPY_CASES if backend == "numpy" else CASES, words)
    for title, row in (("forward", forward), ("with gradients", gradients)):
        if ways := by_hand[title]:
            rows = {name: row(backend, hand, ways, case(), options) for name, case in cases.items()}
            harness.table(f"{title}, {backend}", rows, "by hand")


if __name__ == "__main__":
    main()
