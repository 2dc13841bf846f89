"""Errors of the own elementary functions, in units of the last place, and their special values."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import in_c
import numpy as np
import pytest

from mithril import ops
from mithril.derivatives import gradients
from mithril.graph import Builder
from mithril.graph.decomposition import decompose
from mithril.ops import erf, exp, expm1, log, log1p, max, mish, sigmoid, softmax, tanh
from mithril_cbackend.backend import CBackend
from mithril_cbackend.c_names import LIBM
from mithril_cbackend.compile_target import CompileTarget
from mithril_cbackend.lowering.element.kernel_builder import Machine
from mithril_cbackend.program import compile_graph
from mithril_cbackend.program.c_module import STRUCT

Function = Callable[[Any], Any]
TRUTH: dict[str, tuple[Function, Function, float, float, float]] = {
    # name: ours, in float64, from, to, units
    "exp": (exp, np.exp, -87.3, 88.72, 2),
    "expm1": (expm1, np.expm1, -30.0, 88.0, 4),
    "log": (log, np.log, 1e-30, 1e30, 2),
    "log1p": (log1p, np.log1p, -0.99, 1e6, 4),
    "tanh": (tanh, np.tanh, -12.0, 12.0, 5),
    "erf": (erf, np.vectorize(math.erf), -6.0, 6.0, 6),
    "sigmoid": (sigmoid, lambda x: 1 / (1 + np.exp(-x)), -80.0, 30.0, 5),
}


def compiled(function: Function, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    with Builder() as b:
        y = function(b.input("x", x.shape))
    backend = CBackend()
    return np.array(backend.build(decompose(b.build({"y": y}), backend.lowers))({}, {"x": x})["y"])


@pytest.mark.parametrize("name", list(TRUTH))
def test_units_in_the_last_place(name: str) -> None:
    function, truth, low, high, units = TRUTH[name]
    rng = np.random.default_rng(0)
    x = rng.uniform(low, high, 200_003)
    if low > 0:
        x = np.exp(rng.uniform(math.log(low), math.log(high), x.size))
    x[:1000] = np.linspace(low, high, 1000)
    x[1000:60_000] = np.clip(rng.standard_normal(59_000) * np.exp(rng.uniform(-20, 1, 59_000)), low, high)
    x = x.astype(np.float32)
    expected = truth(x.astype(np.float64))
    error = np.abs(compiled(function, x).astype(np.float64) - expected) / np.spacing(
        np.abs(expected).astype(np.float32)
    )
    worst = int(np.argmax(error))
    assert error[worst] <= units, f"{name}({x[worst]!r}) is {error[worst]:.1f} units off"


def test_ends_and_special_values() -> None:
    special = np.array(
        [np.nan, np.inf, -np.inf, 0.0, -0.0, 88.7228, 88.73, 1e30, -87.33, -104.0, -1e30] * 3, np.float32
    )
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(compiled(exp, special), np.exp(special), rtol=1e-6, atol=1e-37)
        for function, truth in ((tanh, np.tanh), (log, np.log), (expm1, np.expm1), (log1p, np.log1p)):
            np.testing.assert_allclose(compiled(function, special), truth(special), rtol=1e-6, atol=1e-37)


def test_nan_with_any_bits_stays_nan() -> None:
    bits = (np.arange(1, 4097, dtype=np.uint32) * 1021 & 0x7FFFFF | 0x7F800000).astype(np.uint32)
    for function in (exp, tanh, log, erf):
        assert np.isnan(compiled(function, bits.view(np.float32))).all()


def test_softmax_and_similar() -> None:
    """Exponentials of values up to 0 use fewer instructions with the same accuracy."""
    x = np.linspace(-87.0, 0.0, 100_001, dtype=np.float32)[None]

    def less_largest(x: Any) -> Any:
        return exp(x - max(x, axis=-1, keepdims=True))

    expected = np.exp(x.astype(np.float64))
    error = np.abs(compiled(less_largest, x) - expected) / np.spacing(expected.astype(np.float32))
    assert error.max() <= 2
    far = np.array([[0.0, -88.0, -1e30, -np.inf, *[-3.0] * 29]], np.float32)
    result = compiled(less_largest, far)[0]
    assert result[:4].tolist() == [1.0, 0.0, 0.0, 0.0]
    for bad in (np.nan, np.inf):
        far[0, 5] = bad
        assert np.isnan(compiled(softmax, far)).all()
    nan = np.full((1, 40), np.array(0x7FC00001, np.uint32).view(np.float32))  # a recognizable payload
    assert np.isnan(compiled(less_largest, nan)).all()


def test_float16_compiles_for_cpus_with_instructions_for_it() -> None:
    """LLVM ended the process for Intel's CPUs that have AVX512_FP16."""
    with Builder() as b:
        y = mish(b.input("x", (3, 4), "float16"))
    graph = decompose(gradients(b.build({"y": y}), wrt=["x"]), CBackend().lowers)
    executable = compile_graph.compiled(graph, Machine("sapphirerapids", 1), CompileTarget())
    assert executable.program


NAMES = {
    "arccos": "acos", "arccosh": "acosh", "arcsin": "asin", "arcsinh": "asinh", "arctan": "atan", "arctanh": "atanh",
    "arctan2": "atan2", "power": "pow", "floor_divide": "floordiv",
}  # fmt: skip
ONE = "exp expm1 log log1p sin cos arcsin arccos arctan sinh cosh tanh arcsinh arccosh arctanh".split()
TWO = "power arctan2 mod floor_divide".split()
INSTRUCTIONS = {"fabs", "floor", "nearbyint", "sqrt", "trunc"}
SPECIAL = [0.0, 1, 0.5, 2, 3, np.inf, 1e30, 1e-30, 1e10, 1.5, 710.4, 745, 89.3, 0.4142, 2.4142, 7e5, 4e6]


@pytest.mark.parametrize("kind", ["float32", "float64"])
def test_every_number_as_in_numpy_in_process_and_in_c(kind: str, tmp_path: Path) -> None:
    """Cover the branches, all magnitudes and each pair of special values."""
    rng = np.random.default_rng(0)
    special = np.array([*SPECIAL, *(-x for x in SPECIAL), np.nan])
    spread = rng.standard_normal(3000) * np.exp(rng.uniform(-60, 80, 3000))
    x = np.concatenate([np.repeat(special, special.size), spread, rng.uniform(-4, 4, 1000), rng.integers(-9, 9, 1000)])
    y = np.concatenate([np.tile(special, special.size), rng.permutation(x[special.size**2 :])])
    inputs = {"x": x.astype(kind), "y": y.astype(kind)}
    with Builder() as b:
        x_value, y_value = (b.input(name, array.shape, kind) for name, array in inputs.items())
        results = {n: getattr(ops, NAMES.get(n, n))(x_value) for n in ONE}
        results |= {n: getattr(ops, NAMES.get(n, n))(x_value, y_value) for n in TWO}
    backend = CBackend()
    executable = backend.build(decompose(b.build(results), backend.lowers))
    printed = in_c.library(tmp_path / "all.so", [executable.program], 16)
    text = re.sub(r"/\*.*?\*/", "", (tmp_path / "all.c").read_text(), flags=re.DOTALL).partition(STRUCT)[2]
    called = {name for name in LIBM if re.search(rf"\b{name}f?\(", text)} - INSTRUCTIONS
    # Float64 has no vector form of reductions by thousands of digits.
    assert called == ({"fmod", "sin", "cos"} if kind == "float64" else set())
    for outputs in (executable({}, inputs), in_c.call(executable, printed.entry_0, inputs)):
        for name in results:
            arguments = [inputs["x"]] if name in ONE else [inputs["x"], inputs["y"]]
            # The quotient of NumPy is that of the dtype; the other functions are rounded once.
            exact = arguments if name in ("mod", "floor_divide") else [a.astype(np.float64) for a in arguments]
            with np.errstate(all="ignore"):
                true = getattr(np, name)(*exact).astype(kind)
                agrees(name, np.asarray(outputs[name]), true, arguments)


def agrees(name: str, y: np.ndarray[Any, Any], true: np.ndarray[Any, Any], arguments: Any) -> None:
    info = np.finfo(true.dtype)
    close = np.abs(y - true) <= 6 * info.eps * np.abs(true) + 4 * info.tiny
    equal = (y == true) & ((y != 0) | (np.signbit(y) == np.signbit(true)))
    wrong = ~((np.isnan(y) & np.isnan(true)) | equal | (close & (true != 0)))
    assert not wrong.any(), (name, [(*(a[k] for a in arguments), y[k], true[k]) for k in np.flatnonzero(wrong)[:4]])
