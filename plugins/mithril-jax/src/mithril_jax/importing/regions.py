"""The functions inside reductions, windows and sorts of StableHLO, recognized by their operations."""

from __future__ import annotations

from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

COMBINATIONS = ("add", "multiply", "maximum", "minimum", "and", "or")
SELECTIONS = tuple(f"stablehlo.{name}" for name in ("compare", "select", "or", "and", "return"))


def _owner(value: Any) -> Any:
    """Return the operation that computes a value, or None for an argument of a block."""
    return None if isinstance(value, ir.BlockArgument) else value.owner


def combination(block: Any, count: int) -> list[str] | None:
    """Return the name of the operation that combines the arguments k and count + k, for each result, or None."""
    names = []
    results = block.operations[len(block.operations) - 1].operands
    if len(results) != count:
        return None
    for k, result in enumerate(results):
        owner = _owner(result)
        if owner is None or not owner.name.startswith("stablehlo.") or len(owner.operands) != 2:
            return None
        if {_argument(v) for v in owner.operands} != {k, count + k}:
            return None
        names.append(owner.name.removeprefix("stablehlo."))
    return names if all(n in COMBINATIONS for n in names) else None


def _argument(value: Any) -> int | None:
    return value.arg_number if isinstance(value, ir.BlockArgument) else None


def _comparisons(block: Any) -> list[Any]:
    return [op for op in block.operations if op.operation.name == "stablehlo.compare"]


def _direction(comparison: Any) -> str:
    return str(stablehlo.ComparisonDirectionAttr(comparison.operation.attributes["comparison_direction"]).value)


def extreme_position(reduction: Any, axes: tuple[int, ...]) -> str | None:
    """Return "max" or "min" for a reduction to an extreme and its first position, or None."""
    counter = _owner(reduction.operands[1]) if len(reduction.operands) == 4 else None
    if counter is None or counter.name != "stablehlo.iota" or len(axes) != 1:
        return None
    if int(ir.IntegerAttr(counter.attributes["iota_dimension"]).value) != axes[0]:
        return None
    block = reduction.regions[0].blocks[0]
    if any(o.operation.name not in SELECTIONS for o in block.operations):
        return None
    of_values = [c for c in _comparisons(block) if [_argument(v) for v in c.operation.operands] == [0, 2]]
    of_places = [c for c in _comparisons(block) if [_argument(v) for v in c.operation.operands] == [1, 3]]
    directions = {_direction(c) for c in of_values} - {"EQ"}
    if {_direction(c) for c in of_places} != {"LT"} or len(directions) != 1:
        return None
    return {"GT": "max", "LT": "min"}.get(directions.pop())


def sort_keys(block: Any) -> tuple[int, bool] | None:
    """Return the number of operands that a comparison sorts by, and whether the order is ascending; None if unknown.

    The keys must be the first operands, in order. Floats come with selects that make zeros and nan equal.
    """
    if any(op.operation.name not in (*SELECTIONS, "stablehlo.constant") for op in block.operations):
        return None
    directions: dict[int, str] = {}
    for op in _comparisons(block):
        left, right = (_source(v) for v in op.operation.operands)
        if left is None or right is None or left == right or _direction(op) in ("EQ", "NE"):
            continue
        if left % 2 or right != left + 1:
            return None
        directions[left // 2] = _direction(op)
    if sorted(directions) != list(range(len(directions))) or len({*directions.values()}) != 1:
        return None
    (direction,) = {*directions.values()}
    return (len(directions), direction == "LT") if direction in ("LT", "GT") else None


def _source(value: Any) -> int | None:
    """Return the argument of the block that a value is, up to its zeros and nan."""
    while (owner := _owner(value)) is not None:
        if owner.name != "stablehlo.select":
            return None
        value = owner.operands[2]
    return _argument(value)
