"""Index checks (``checks=True``): the smallest and largest index of each lookup are results of the program.

Every call checks these results before it returns the others; an index out of range is an error on every backend. The
checks of loop bounds (``bounds.py``) use the same mechanism and are always enabled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mithril.graph import (
    Graph,
    InputError,
    Node,
    Output,
    Size,
    Value,
    axes_of,
    is_unchanged,
    iterate,
    numel,
    result,
    substitute,
    symbols,
)


@dataclass(frozen=True)
class Check:
    """The smallest and largest index of a lookup, and their valid range."""

    low: str
    high: str
    size: Size
    op: str
    where: str
    negative: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        return self.low, self.high

    def raise_if_violated(self, values: Sequence[Any], sizes: Mapping[str, int]) -> None:
        """Raise InputError if an index is out of range."""
        low, high = map(int, values)
        size = int(substitute(self.size, sizes))
        if _lowest(size, self.negative) <= low and high < size:
            return
        raise _label_error(high if high >= size else low, size, self.op, self.where, self.negative)


def _lowest(size: int, negative: bool) -> int:
    return -size if negative else 0


def _label_error(index: int, size: int, op: str, where: str, negative: bool) -> InputError:
    if negative:
        return InputError(
            f"index {index} of '{op}' is out of range for {size} elements",
            facts=[where, f"accepted: {-size} to {size - 1}; negative indices count from the end"],
        )
    hint = (
        f"to ignore rows without a label, pass ops.{op}(..., ignore_index={index})" if op == "cross_entropy" else None
    )
    return InputError(
        f"label {index} of '{op}' is out of range for {size} classes",
        facts=[where, f"accepted: 0 to {size - 1}"],
        hint=hint if index < 0 else None,
    )


def with_checks(graph: Graph) -> tuple[Graph, list[Check], bool]:
    """Return the graph with the added results, the checks, and whether lookups in regions are not checked."""
    from mithril import ops

    editor = graph.edit()
    checks: list[Check] = []
    extra: list[Output] = []
    for node in graph.nodes:
        for lookup in lookups(node):
            with editor.before(node):
                indices = lookup.written()
                # Append a zero, which is always valid, because min and max of an empty batch do not exist.
                flat = ops.reshape(indices, shape=(numel(indices.shape),))
                extended = ops.concat(flat, ops.full(shape=(1,), value=0, dtype=flat.dtype), axis=0)
                low = result("check", f"{len(checks)}/low", ops.min(extended))
                high = result("check", f"{len(checks)}/high", ops.max(extended))
                extra += [low, high]
            checks.append(Check(low.name, high.name, lookup.size, node.op.name, str(node.origin), lookup.negative))
    in_regions = any(
        True for node in graph.nodes for region in node.regions for n, _ in iterate(region) if any(lookups(n))
    )
    if not checks:
        return graph, checks, in_regions
    new_graph = editor.freeze()
    return new_graph.replaced(results=(*new_graph.results, *extra)), checks, in_regions


@dataclass(frozen=True)
class Lookup:
    """Indices that an operation reads, and the size that they index."""

    indices: Value
    size: Size
    ignored: int | None = None  # sentinel: no index
    component: int | None = None  # offset on the last axis, if that axis holds index tuples
    negative: bool = True  # whether indices may count from the end; class labels may not

    def written(self) -> Any:
        """Add the computation of the indices to the current graph."""
        from mithril import ops

        if self.component is not None:
            return self.indices[..., self.component]
        if self.ignored is None:
            return self.indices
        return ops.where(ops.equal(self.indices, self.ignored), 0, self.indices)


def lookups(node: Node) -> Iterator[Lookup]:
    """Yield the lookups of an operation."""

    def operand(k: int) -> Value:
        value = node.operands[k]
        assert value is not None
        return value

    op = node.op
    if op.labels is not None:
        labels = op.operands.index(op.labels)
        indexed = operand(0 if labels else 1)  # the table or scores that labels index
        if operand(labels).dtype.is_integer:
            size = indexed.shape[node.attributes.get("axis", 0)]
            tokens = "axis" not in node.attributes  # class labels do not count from the end
            yield Lookup(operand(labels), size, ignored=node.attributes.get("ignore_index"), negative=tokens)
    elif op.moves or op.linear:
        if op.composite or op.elementwise or node.regions:
            return
        axes = axes_of(node)
        places = [fs[-1] for k, _, _ in axes.lookups[:1] if (fs := axes.operands[k])]
        stacked = any(axes.role(f) is not None for factors in places for f in factors)
        for component, (indices, table, axis) in enumerate(axes.lookups):
            if indices != table:
                size = operand(table).shape[axis]
                yield Lookup(operand(indices), size, component=component if stacked else None)


@dataclass(frozen=True)
class IndexInput:
    """An input whose elements are used as indices directly (labels, tokens) and can be checked before the call."""

    name: str
    size: int
    ignored: int | None
    op: str
    where: str
    negative: bool = True

    def raise_if_violated(self, array: np.ndarray[Any, Any]) -> None:
        """Raise InputError if an index is out of range."""
        if not array.size:
            return
        low, high, lowest = int(array.min()), int(array.max()), _lowest(self.size, self.negative)
        if (low < lowest or high >= self.size) and self.ignored is not None:
            array = np.where(array == self.ignored, 0, array)
            low, high = int(array.min()), int(array.max())
        if low < lowest or high >= self.size:
            error = _label_error(high if high >= self.size else low, self.size, self.op, self.where, self.negative)
            raise error.with_facts(f"in '{self.name}'")


def given_indices(graph: Graph) -> tuple[IndexInput, ...]:
    """Return the inputs with labels or tokens. Other lookups are excluded, as models may rely on clamping."""
    checks: dict[IndexInput, None] = {}
    inputs = {i.value: i.name for i in graph.with_role("input")}
    for node in graph.nodes:
        for lookup in lookups(node) if node.op.labels else ():
            value = lookup.indices
            while (producer := graph.producers.get(value)) is not None and is_unchanged(producer):
                place = next(k for k, r in enumerate(producer.results) if r is value)
                source = producer.operands[place]  # a barrier has one result per operand
                assert source is not None
                value = source
            plain = lookup.component is None and isinstance(lookup.size, int)
            if plain and value in inputs and value.dtype.is_integer:
                size: Any = lookup.size
                origin = str(node.origin)
                checks[IndexInput(inputs[value], size, lookup.ignored, node.op.name, origin, lookup.negative)] = None
    return tuple(checks)


@dataclass(frozen=True)
class IndexCheckedExecutable:
    """An executable that verifies the check results before it returns the others."""

    executable: Any
    checks: Sequence[Any]
    types: Mapping[str, Any]
    backend: Any

    def __call__(self, params: Mapping[str, Any], inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        return self.without_check_outputs(self.executable(params, inputs), inputs)

    def without_check_outputs(self, results: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Verify and remove the check results."""
        left = dict(results)
        sizes = self._sizes(inputs)
        for check in self.checks:
            check.raise_if_violated([self.backend.to_numpy(left.pop(name)) for name in check.names], sizes)
        return left

    def _sizes(self, inputs: Mapping[str, Any]) -> dict[str, int]:
        from mithril.graph import bind

        if not any(symbols(check.size) for check in self.checks if isinstance(check, Check)):
            return {}
        return bind({n: t.shape for n, t in self.types.items()}, {n: tuple(inputs[n].shape) for n in self.types})
