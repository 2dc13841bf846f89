"""Errors of the elementary functions on every installed backend, in ulp, against arithmetic of 60 digits.

``nox -s bench -- accuracy`` prints the table; ``tests/test_accuracy.py`` compares a sample with ``docs/semantics.md``.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import mpmath as mp
import numpy as np

from mithril import ops, plugins
from mithril.graph import Builder, DType, decompose, dtype as as_dtype

mp.mp.dps = 60
ROOT_HALF = mp.sqrt(mp.mpf(1) / 2)
WIDE, POSITIVE, UNIT = (-80.0, 80.0), (1e-30, 1e30), (-1.0, 1.0)
EXACT: dict[str, tuple[Callable[[Any], Any], tuple[float, float]]] = {  # function: its definition, and a range
    "exp": (mp.exp, WIDE), "expm1": (mp.expm1, WIDE), "log": (mp.log, POSITIVE), "log1p": (mp.log1p, (-0.999, 1e9)),
    "sqrt": (mp.sqrt, POSITIVE), "rsqrt": (lambda x: 1 / mp.sqrt(x), POSITIVE), "sin": (mp.sin, (-1e6, 1e6)),
    "cos": (mp.cos, (-1e6, 1e6)), "asin": (mp.asin, UNIT), "acos": (mp.acos, UNIT), "atan": (mp.atan, (-1e6, 1e6)),
    "sinh": (mp.sinh, WIDE), "cosh": (mp.cosh, WIDE), "tanh": (mp.tanh, WIDE), "asinh": (mp.asinh, (-1e9, 1e9)),
    "acosh": (mp.acosh, (1.0, 1e9)), "atanh": (mp.atanh, UNIT), "erf": (mp.erf, (-6.0, 6.0)),
    "erfinv": (mp.erfinv, UNIT), "sigmoid": (lambda x: 1 / (1 + mp.exp(-x)), WIDE),
    "log_sigmoid": (lambda x: -mp.log1p(mp.exp(-x)), WIDE), "softplus": (lambda x: mp.log1p(mp.exp(x)), WIDE),
    "silu": (lambda x: x / (1 + mp.exp(-x)), WIDE), "gelu": (lambda x: x * mp.erfc(-x * ROOT_HALF) / 2, (-12.0, 12.0)),
}  # fmt: skip
GELU_TAIL = 8  # machine epsilons: the tail of gelu has an absolute limit, since 1 + erf cancels


def points(name: str, dtype: DType, count: int) -> np.ndarray[Any, Any]:
    """Return points of the range: even, close to 0, close to its ends, and where reductions are hard."""
    low, high = EXACT[name][1]
    generator = np.random.default_rng(len(name))
    even = generator.uniform(low, high, count)
    small = np.exp(generator.uniform(math.log(1e-6), math.log(high), count))
    ends = [low + (high - low) * np.exp(-generator.uniform(3, 15, count // 2))]
    ends.append(high - (high - low) * np.exp(-generator.uniform(3, 15, count // 2)))
    sampled = np.concatenate([even, small, *ends, -small if low < 0 else small])
    if name in ("sin", "cos"):  # where digits of a reduced argument cancel
        sampled = np.concatenate([sampled, generator.integers(1, 600_000, count) * (math.pi / 2)])
    limit = float(np.finfo(dtype.numpy).max) if dtype.name == "float16" else 3e38
    sampled = np.clip(sampled, max(low, -limit), min(high, limit)).astype(dtype.numpy)
    return sampled[(np.abs(sampled) < 1) if (low, high) == UNIT else np.isfinite(sampled)]


def exact(name: str, x: np.ndarray[Any, Any]) -> list[Any]:
    return [EXACT[name][0](mp.mpf(float(v))) for v in x]


def error(y: float, true: Any, dtype: DType) -> float:
    """Return the error in units of the last place of the true value; 0 where that is denormal or infinite."""
    info = np.finfo(dtype.numpy)
    if not float(info.tiny) <= abs(true) <= float(info.max):
        return 0.0
    if not math.isfinite(y):
        return math.inf
    return float(abs(mp.mpf(y) - true) / mp.ldexp(1, int(mp.floor(mp.log(abs(true), 2))) - info.nmant))


def errors(backend: Any, dtype: DType, count: int) -> dict[str, tuple[float, float]]:
    """Return the largest error of each function on a backend, and where it is."""
    arrays = {name: points(name, dtype, count) for name in EXACT}
    with Builder() as b:
        results = {n: getattr(ops, n)(b.input(f"x_{n}", x.shape, dtype)) for n, x in arrays.items()}
    program = backend.build(decompose(b.build(results), lambda node: backend.lowers(node) or backend.falls_back(node)))
    outputs = program({}, {f"x_{n}": backend.array(x) for n, x in arrays.items()})
    largest = {}
    for name, x in arrays.items():
        y = np.asarray(backend.to_numpy(outputs[name])).astype(np.float64)
        pairs = zip(x.astype(np.float64), y, exact(name, x), strict=True)
        measured = [(error(y, true, dtype), x) for x, y, true in pairs if not is_tail(name, x, y, true, dtype)]
        largest[name] = max(measured)
    return largest


def is_tail(name: str, x: float, y: float, true: Any, dtype: DType) -> bool:
    """Whether the absolute limit of gelu applies and holds."""
    return name == "gelu" and x < -1 and abs(mp.mpf(y) - true) <= GELU_TAIL * float(np.finfo(dtype.numpy).eps)


def main() -> None:
    names = sys.argv[1:] or sorted(plugins.backends())
    for kind in ("float32", "float64"):
        dtype = as_dtype(kind)
        backends = [one for one in (plugins.backend_class(name)() for name in names) if dtype in one.dtypes]
        table = {one.name: errors(one, dtype, 400) for one in backends}
        print(f"\n| {kind} | {' | '.join(table)} |\n|---|{'---|' * len(table)}")
        for function in EXACT:
            cells = [f"{row[function][0]:.1f} at {row[function][1]:.4g}" for row in table.values()]
            print(f"| {function} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
