"""Results whose size depends on data, with a bound: rows beyond their number are padding, which no operator may mix in.

``NonMaxSuppression`` and ``NonZero`` with a bound have a fixed number of rows. The axis of these rows is followed
through the graph; an operator that combines rows would read the padding, and is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mithril.graph import UnsupportedError, Value

UNARY = {
    *("Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "BitwiseNot", "Cast", "Ceil", "Celu", "Clip"),
    *("Cos", "Cosh", "Elu", "Erf", "Exp", "Floor", "Gelu", "HardSigmoid", "HardSwish", "Identity", "IsInf"),
    *("IsNaN", "LeakyRelu", "Log", "Mish", "Neg", "Not", "Reciprocal", "Relu", "Round", "Selu", "Sigmoid", "Sign"),
    *("Sin", "Sinh", "Softplus", "Softsign", "Sqrt", "Swish", "Tan", "Tanh", "ThresholdedRelu"),
}
BINARY = {
    *("Add", "And", "BitShift", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "Div", "Equal", "Greater"),
    *("GreaterOrEqual", "Less", "LessOrEqual", "Max", "Mean", "Min", "Mod", "Mul", "Or", "Pow", "PRelu", "Sub"),
    *("Sum", "Where", "Xor"),
}


class BoundedRows:
    """The axis of the rows of each value that holds them, and the number of rows of each bounded result."""

    def __init__(self) -> None:
        self.axes: dict[Value, int] = {}
        self.numbers: dict[str, Value] = {}  # by the name of the result
        self.sources: dict[Value, str] = {}

    def start(self, name: str, source: str, value: Value, axis: int, number: Value) -> None:
        """Enter a bounded result."""
        self.axes[value], self.sources[value], self.numbers[name] = axis, source, number

    def axis(self, x: Any) -> int | None:
        return self.axes.get(x) if isinstance(x, Value) else None

    def follow(self, node: Any, operands: Sequence[Any], attributes: Mapping[str, Any], results: Sequence[Any]) -> None:
        """Enter the results of an operator on rows; raise UnsupportedError if it combines them."""
        within = [x for item in operands for x in (item if isinstance(item, list) else [item])]
        rows = [x for x in within if self.axis(x) is not None]
        if not rows or any(r is x for r in results for x in rows):
            return
        source = self.sources[rows[0]]
        rule = RULES.get(node.op_type)
        if rule is None and node.op_type in UNARY:
            rule = _unary
        if rule is None and node.op_type in BINARY:
            rule = _aligned
        axis = rule(self, operands, attributes, results) if rule is not None else None
        if axis is None:
            raise UnsupportedError(
                f"'{node.op_type}' combines the rows of {source}, of which those beyond their number are padding",
                hint="import up to its operands, ml.from_onnx(path, outputs=[...], bounds=...), then compute the rest",
            )
        for result in results:
            if isinstance(result, Value):
                self.axes[result], self.sources[result] = axis, source


Rule = Callable[[BoundedRows, Sequence[Any], Mapping[str, Any], Sequence[Any]], int | None]


def _unary(
    rows: BoundedRows, operands: Sequence[Any], attributes: Mapping[str, Any], results: Sequence[Any]
) -> int | None:
    return rows.axis(operands[0])


def _aligned(
    rows: BoundedRows, operands: Sequence[Any], attributes: Mapping[str, Any], results: Sequence[Any]
) -> int | None:
    """Return the common axis of broadcast operands; others have one element along it."""
    rank, axes = len(results[0].shape), set()
    for x in operands:
        axis = rows.axis(x)
        if axis is not None:
            axes.add(axis + rank - len(x.shape))
    if len(axes) != 1:
        return None
    (common,) = axes
    fixed = [x for x in operands if x is not None and rows.axis(x) is None]
    sizes = [x.shape[common - rank + len(x.shape)] for x in fixed if common - rank + len(x.shape) >= 0]
    return common if all(n == 1 for n in sizes) else None


def _gather(
    rows: BoundedRows, operands: Sequence[Any], attributes: Mapping[str, Any], results: Sequence[Any]
) -> int | None:
    x, indices = operands[:2]
    along = attributes.get("axis", 0) % len(x.shape)
    selected, stored = rows.axis(indices), rows.axis(x)
    if selected is not None:
        return along + selected if stored is None else None
    return None if stored in (None, along) else stored + (len(indices.shape) - 1 if along < stored else 0)


def _gather_nd(
    rows: BoundedRows, operands: Sequence[Any], attributes: Mapping[str, Any], results: Sequence[Any]
) -> int | None:
    x, indices = operands[:2]
    axis = rows.axis(indices)
    return axis if rows.axis(x) is None and axis is not None and axis < len(indices.shape) - 1 else None


def _slice(
    rows: BoundedRows, operands: Sequence[Any], attributes: Mapping[str, Any], results: Sequence[Any]
) -> int | None:
    """Return the axis if all rows stay, in their order: padding comes last."""
    x, starts, _, axes, steps = [*operands, None, None][:5]
    axis = rows.axis(x)
    if axis is None or results[0].shape[axis] != x.shape[axis]:
        return None
    steps = [1] * len(starts) if steps is None else steps
    reverse = [k for k, step in zip(axes if axes is not None else range(len(starts)), steps, strict=True) if step < 0]
    return None if axis in [k % len(x.shape) for k in reverse] else axis


def _transpose(
    rows: BoundedRows, operands: Sequence[Any], attributes: Mapping[str, Any], results: Sequence[Any]
) -> int | None:
    axis, rank = rows.axis(operands[0]), len(operands[0].shape)
    return None if axis is None else list(attributes.get("perm") or reversed(range(rank))).index(axis)


def _reshape(
    rows: BoundedRows, operands: Sequence[Any], attributes: Mapping[str, Any], results: Sequence[Any]
) -> int | None:
    """Return the axis of the same size with as many elements before it: rows stay separate."""
    axis, old, new = rows.axis(operands[0]), operands[0].shape, results[0].shape
    if axis is None or not all(isinstance(n, int) for n in (*old, *new)):
        return None
    before = _product(old[:axis])
    places = [k for k, n in enumerate(new) if n == old[axis] and _product(new[:k]) == before]
    return places[0] if places else None


def _product(sizes: Sequence[int]) -> int:
    total = 1
    for n in sizes:
        total *= n
    return total


def _concat(
    rows: BoundedRows, operands: Sequence[Any], attributes: Mapping[str, Any], results: Sequence[Any]
) -> int | None:
    axes = {rows.axis(x) for x in operands}
    axis = axes.pop()
    along = attributes.get("axis", 0) % len(results[0].shape)
    return axis if not axes and axis is not None and axis != along else None


RULES: dict[str, Rule] = {
    "Gather": _gather,
    "GatherND": _gather_nd,
    "Slice": _slice,
    "Transpose": _transpose,
    "Concat": _concat,
    **dict.fromkeys(("Reshape", "Squeeze", "Unsqueeze", "Flatten"), _reshape),
}
