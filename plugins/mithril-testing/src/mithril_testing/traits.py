"""Whether an operation's traits hold on its samples: linear in some operands, moving elements only, commutative."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from mithril.graph import Op
from mithril_testing.cases import Case

Array = np.ndarray[Any, Any]
PRECISIONS = (None, "low", "follow", "full")


def false_traits(op: Op) -> list[str]:
    """Return the traits that an operation claims and that a sample contradicts."""
    wrong = []
    if op.precision not in PRECISIONS:
        wrong.append(f"'{op.name}': precision='{op.precision}' is not low, follow or full")
    if op.labels is not None and op.labels not in op.operands:
        wrong.append(f"'{op.name}': labels='{op.labels}' is not an operand")
    for number, sample in enumerate(op.samples):
        case = Case(op, sample, number)
        wrong += [f"{case.id}: {reason}" for reason in _contradictions(case)]
    return wrong


def _contradictions(case: Case) -> Iterator[str]:
    op, arrays = case.op, case.op.all_operands(case.arrays)
    attributes = case.sample.attributes
    for group in (g.split() for g in op.linear.split("|") if g.split()):
        if op.variadic:
            places = list(range(len(arrays)))
        else:
            places = [op.operands.index(name) for name in group]
        floats = all((a := arrays[k]) is not None and a.dtype.kind == "f" for k in places)
        if floats and not _is_linear(op, arrays, places, attributes):
            yield f"it is not linear in {' and '.join(group)}"
    if op.moves and not _moves(op, arrays, attributes):
        yield "a result has elements that no operand has: it does more than move them"
    if op.commutative and not _same(op.evaluate(arrays, attributes), op.evaluate(arrays[::-1], attributes)):
        yield "it is not commutative"


def _is_linear(op: Op, arrays: list[Array | None], places: list[int], attributes: dict[str, Any]) -> bool:
    """Whether f(2a + 3b) = 2f(a) + 3f(b), for other elements b in the same operands."""
    rng = np.random.default_rng(0)
    first, second, combined = list(arrays), list(arrays), list(arrays)
    for k in places:
        a = arrays[k]
        assert a is not None
        b = np.asarray(rng.uniform(-1, 1, a.shape), a.dtype)
        second[k], combined[k] = b, 2 * a + 3 * b
    x, y, z = (_results(op.evaluate(values, attributes)) for values in (first, second, combined))
    return all(_same(2 * np.asarray(u, float) + 3 * np.asarray(v, float), w) for u, v, w in zip(x, y, z, strict=True))


def _moves(op: Op, arrays: list[Array | None], attributes: dict[str, Any]) -> bool:
    """Whether each element of a result is an operand's, zero, or a number among the attributes."""
    numbers = [v for v in op.complete(attributes).values() if isinstance(v, (int, float))]
    allowed = {0.0, *map(float, numbers)}
    for a in arrays:
        allowed |= set() if a is None else {float(v) for v in a.reshape(-1)}
    for result in _results(op.evaluate(arrays, attributes)):
        values = [float(v) for v in result.reshape(-1)]
        if any(v not in allowed and v == v for v in values):
            return False
    return True


def _results(result: Any) -> tuple[Array, ...]:
    return result if isinstance(result, tuple) else (result,)


def _same(actual: Any, expected: Any) -> bool:
    return all(
        np.allclose(np.asarray(a, float), np.asarray(b, float), rtol=1e-4, atol=1e-4, equal_nan=True)
        for a, b in zip(_results(actual), _results(expected), strict=True)
    )
