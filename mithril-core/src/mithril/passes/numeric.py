"""Whether a pass leaves the results of a graph as they are: evaluated on random arrays, before and after."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mithril.base import PassError, substitute, symbols
from mithril.ir import Graph, evaluate, rounding_spread
from mithril.passes.declare import Pass

ROUNDING = 0.04  # of a tolerance is that of each operation: 0.004 for mixed precision, the rounding of bfloat16
SPREADS = 3  # one sample of rounding may lie this much nearer than another


def check_results(one: Pass, before: Graph, after: Graph, origin: Sequence[str]) -> None:
    arguments = random_arguments(before)
    expected = evaluate(before, arguments)
    got = evaluate(after, {n: a for n, a in arguments.items() if n in {i.name for i in after.inputs}})
    spread: dict[str, float] | None = None
    for name, array in expected.items():
        other = got[name]
        if one.exact:
            same = np.array_equal(array, other, equal_nan=array.dtype.kind == "f")
        else:
            scale = float(np.max(np.abs(array.astype(np.float64)), initial=1.0)) if array.size else 1.0
            same = _close(array, other, one.tolerance, 0.1 * one.tolerance * scale)
            if not same:
                spread = spread or rounding_spread(before, arguments, ROUNDING * one.tolerance)
                same = _close(array, other, one.tolerance, 0.1 * one.tolerance * scale + SPREADS * spread[name])
        if not same:
            difference = np.max(np.abs(array.astype(np.float64) - other.astype(np.float64)), initial=0.0)
            raise PassError(
                f"pass '{one.name}' changes the value of output '{name}'",
                facts=[f"largest difference {difference:.3g}", "on random inputs", *origin],
                hint="declare exact=False if the last places may change; otherwise the pass is wrong",
            )


def _close(array: Any, other: Any, relative: float, absolute: float) -> bool:
    pair = array.astype(np.float64), other.astype(np.float64)
    return np.allclose(*pair, rtol=relative, atol=absolute, equal_nan=True)


def random_arguments(graph: Graph, seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    """Random arrays for a graph's inputs; symbolic sizes get small values within their bounds."""
    rng = np.random.default_rng(seed)
    sizes = {}
    for k, s in enumerate(symbols(*(d for i in graph.inputs for d in i.type.shape))):
        sizes[s.name] = min(max(s.low, 2 + k), s.high if s.high is not None else 2 + k)
    out = {}
    for i in graph.arguments:
        shape = tuple(int(substitute(d, sizes)) for d in i.type.shape)
        kind = i.type.dtype
        if kind.is_float:
            out[i.name] = rng.uniform(-1, 1, shape).astype(kind.numpy)
        elif kind.is_bool:
            out[i.name] = rng.random(shape) < 0.5
        else:
            out[i.name] = rng.integers(0, 3, shape).astype(kind.numpy)
    return out
