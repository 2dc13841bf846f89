"""Numeric check of a pass: evaluate the graph on random arrays before and after it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice, product
from typing import Any

import numpy as np

from mithril.graph import Graph, PassError, evaluate, rounding_spread, substitute, symbols
from mithril.passes.declare import Pass

ROUNDING = 0.04  # rounding per operation, as a fraction of the tolerance: 0.004 (bfloat16) for mixed precision
TRIED = 10_000  # combinations of sizes, until one satisfies all guards
SPREADS = 3  # multiple of the estimated rounding spread that is allowed, as one sample can underestimate it


def check_results(one: Pass, before: Graph, after: Graph, origin: Sequence[str]) -> None:
    arguments = random_arguments(before)
    expected = evaluate(before, arguments)
    actual = evaluate(after, {n: a for n, a in arguments.items() if n in {i.name for i in after.inputs}})
    spread: dict[str, float] | None = None
    for name, array in expected.items():
        other = actual[name]
        if one.exact:
            is_equal = np.array_equal(array, other, equal_nan=True)
        else:
            sizes = np.abs(array.astype(np.float64))
            scale = float(np.max(sizes[np.isfinite(sizes)], initial=1.0))
            is_equal = _close(array, other, one.tolerance, 0.1 * one.tolerance * scale)
            if not is_equal:
                spread = spread or rounding_spread(before, arguments, ROUNDING * one.tolerance)
                is_equal = _close(array, other, one.tolerance, 0.1 * one.tolerance * scale + SPREADS * spread[name])
        if not is_equal:
            difference = np.max(np.abs(array.astype(np.float64) - other.astype(np.float64)), initial=0.0)
            raise PassError(
                f"pass '{one.name}' changes the value of output '{name}'",
                facts=[f"largest difference {difference:.3g}", "on random inputs", *origin],
                hint="declare exact=False if rounding may change; otherwise the pass has a bug",
            )


def _close(array: Any, other: Any, relative: float, absolute: float) -> bool:
    pair = array.astype(np.float64), other.astype(np.float64)
    return np.allclose(*pair, rtol=relative, atol=absolute, equal_nan=True)


def random_arguments(graph: Graph, seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    """Return random arrays for the inputs of a graph; symbolic sizes get small values within bounds and guards."""
    rng = np.random.default_rng(seed)
    sizes = small_sizes(graph)
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


def small_sizes(graph: Graph) -> dict[str, int]:
    """Return small values of the symbolic sizes, each of its own if the guards allow it."""
    unknown = symbols(*(d for i in graph.inputs for d in i.type.shape))
    choices = []
    for k, s in enumerate(unknown):
        highest = s.low + 8 if s.high is None else min(s.high, s.low + 8)
        preferred = max(s.low, 2 + k) if s.high is None else min(max(s.low, 2 + k), s.high)
        choices.append(list(dict.fromkeys((preferred, *range(max(s.low, 1), highest + 1)))))
    candidates = (dict(zip((s.name for s in unknown), values, strict=True)) for values in product(*choices))
    first = next(candidates)
    names = set(first)
    guards = [g for g in graph.guards if {s.name for s in symbols(g.left, g.right)} <= names]
    tried = chain([first], islice(candidates, TRIED))
    return next((sizes for sizes in tried if all(g.holds(sizes) for g in guards)), first)
