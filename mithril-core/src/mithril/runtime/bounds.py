"""Loops that stop at their bound although their condition still holds, and positions behind the end of a buffer.

A call that runs such a loop, or writes to such a position, raises.
A flag becomes a result of the program. It leaves a body as one more result of the ``if``, one more state of the
``while``, one more carry of the ``scan`` around it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mithril.base import InputError, TensorType, dtype as as_dtype
from mithril.ir import Builder, Graph, Input, Node, Output, Value, iterate, result
from mithril.ops import BOUNDED, PLACES

FLAG = TensorType(as_dtype("int32"), ())
STATES = {"while": "states", "scan": "carries"}  # the attribute that counts the values of a round


@dataclass(frozen=True)
class Bound:
    """A result of a program that is 1 where a loop was cut off."""

    name: str
    loop: str
    trips: int
    where: str

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    def hold(self, values: Sequence[Any], sizes: Mapping[str, int]) -> None:
        """Raise where the loop was cut off."""
        if np.any(values[0]):
            raise InputError(
                f"the loop '{self.loop}' ran max_trips={self.trips} rounds, and its condition still holds",
                facts=[self.where, "its results would be those of a loop that did not end"],
                hint=f"raise max_trips, for example While(..., max_trips={2 * max(self.trips, 1)})",
            )


@dataclass(frozen=True)
class Room:
    """A result of a program that is 1 where a position was not one of a buffer, such as a cache of keys and values."""

    name: str
    owner: str
    size: int
    where: str

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    def hold(self, values: Sequence[Any], sizes: Mapping[str, int]) -> None:
        """Raise where a position was outside."""
        if np.any(values[0]):
            raise InputError(
                f"'{self.owner}' has room for {self.size} positions, and this call reaches beyond them",
                facts=[self.where, f"accepted: position and the number of new tokens together at most {self.size}"],
                hint="begin again at position 0 with initial_state(), or build the layer for more positions",
            )


KINDS = {kind.__name__: kind for kind in (Bound, Room)}  # by the name that cached programs have for them


def with_bounds(graph: Graph) -> tuple[Graph, list[Bound | Room]]:
    """Return the graph with those flags as results, and a ``Bound`` or ``Room`` for each."""
    if not any(BOUNDED in node.tags or PLACES in node.tags for node, _ in iterate(graph)):
        return graph, []
    marked, flags = _marked(graph)
    bounds: list[Bound | Room] = []
    extra: list[Output] = []
    for node, flag in flags:
        extra.append(result("check", f"bound/{len(bounds)}", flag))
        name = extra[-1].name
        if BOUNDED in node.tags:
            bounds.append(Bound(name, node.tags[BOUNDED], node.attributes["max_trips"], str(node.origin)))
        else:
            size, _, owner = node.tags[PLACES].partition(" ")
            bounds.append(Room(name, owner, int(size), str(node.origin)))
    return marked.replaced(results=(*marked.results, *extra)), bounds


def _marked(graph: Graph) -> tuple[Graph, list[tuple[Node, Value]]]:
    """Return the graph, and a flag with its node for each that is or contains a bounded loop or a position."""
    from mithril import ops

    editor = graph.edit()
    flags: list[tuple[Node, Value]] = []
    for node, following in zip(graph.nodes, [*graph.nodes[1:], None], strict=True):
        inner = (n for region in node.regions for n, _ in iterate(region))
        loop = next((n for n in inner if BOUNDED in n.tags or PLACES in n.tags), None)
        parts: list[Value] = []
        if loop is not None:
            with editor.before(node) as builder:
                wider, flag = _widened(node, builder)
            node = editor.replace_node(node, wider)
            parts.append(flag)
        if BOUNDED in node.tags:
            count = node.attributes["states"]
            with editor.before(following) as builder:
                (holds,) = builder.inline(node.regions[0], [*node.results[:count], *node.operands[count:]])
                parts.append(ops.cast(holds, dtype=FLAG.dtype))
        if PLACES in node.tags:
            with editor.before(following):
                parts.append(_outside(node))
        if parts:
            with editor.before(following):
                flags.append((loop or node, parts[0] if len(parts) == 1 else ops.maximum(*parts)))
    return editor.freeze(), flags


def _outside(node: Node) -> Value:
    """Return the flag of integers that are no places of their buffer."""
    from mithril import ops

    places, size = node.result, int(node.tags[PLACES].partition(" ")[0])
    invalid = ops.logical_or(ops.less(places, 0), ops.greater_equal(places, size))
    flag: Value = ops.cast(ops.any(invalid), dtype=FLAG.dtype)
    return flag


def _widened(node: Node, builder: Builder) -> tuple[Node, Value]:
    """Add a result to the node: the flag of the loops inside."""
    from mithril import ops

    result = Value(builder.unique("cut_off"), FLAG)
    counted = STATES.get(node.op.name)
    if counted is None:
        regions = tuple(_with_flag(region, None) for region in node.regions)
        return node.replaced(regions=regions, results=(*node.results, result)), result
    count = node.attributes[counted]
    regions = tuple(_with_flag(region, count) for region in node.regions)
    return (
        node.replaced(
            operands=(*node.operands[:count], ops.full(shape=(), value=0, dtype=FLAG.dtype), *node.operands[count:]),
            attributes={**node.attributes, counted: count + 1},
            regions=regions,
            results=(*node.results[:count], result, *node.results[count:]),
        ),
        result,
    )


def _with_flag(region: Graph, place: int | None) -> Graph:
    """Add the flag to the outputs of a body; with ``place`` to its inputs too, there, except out of a condition."""
    from mithril import ops

    marked, flags = _marked(region)
    inputs = list(marked.inputs)
    editor = marked.edit()
    values = [flag for _, flag in flags]
    if place is not None:
        captured = [k for k, i in enumerate(inputs) if i.role != "constant"]
        used = {i.name for i in inputs} | {v.name for n in marked.nodes for v in n.results}
        name = next(n for k in range(len(used) + 1) if (n := f"cut_off_{k}") not in used)
        before = Value(name, FLAG)
        inputs.insert(captured[place] if place < len(captured) else len(inputs), Input(before))
        values.insert(0, before)
    if place is not None and region.name == "condition":
        return marked.replaced(inputs=tuple(inputs))
    with editor.before(None):
        flag = values[0] if values else ops.full(shape=(), value=0, dtype=FLAG.dtype)
        for other in values[1:]:
            flag = ops.maximum(flag, other)
    position = len(marked.outputs) if place is None else place
    changed = editor.freeze()
    widened: Graph = changed.replaced(
        inputs=(*inputs, *changed.inputs[len(marked.inputs) :]),
        results=(*changed.results[:position], Output(flag, "cut_off"), *changed.results[position:]),
    )
    return widened
