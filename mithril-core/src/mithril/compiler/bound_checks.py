"""Run-time checks of loop bounds and buffer positions.

A call raises if a loop reaches ``max_trips`` while its condition still holds, or writes past the end of a buffer. The
flag is a result of the program; it leaves a region as an additional result of the ``if``, state of the ``while`` or
carry of the ``scan`` that contains it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mithril.graph import (
    BOUNDED,
    CHECKS,
    PLACES,
    REACHED,
    Builder,
    Graph,
    Input,
    InputError,
    Node,
    Output,
    TensorType,
    Value,
    dtype as as_dtype,
    iterate,
    result,
)

FLAG = TensorType(as_dtype("int32"), ())
STATES = {"while": "states", "scan": "carries"}  # attribute with the number of loop-carried values


@dataclass(frozen=True)
class Bound:
    """A result of a program that is 1 if a loop reached its bound."""

    name: str
    loop: str
    trips: int
    where: str

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    def raise_if_violated(self, values: Sequence[Any], sizes: Mapping[str, int]) -> None:
        """Raise InputError if the loop reached its bound."""
        if np.any(values[0]):
            raise InputError(
                f"the loop '{self.loop}' reached max_trips={self.trips} while its condition still holds",
                facts=[self.where, "the results would be those of an incomplete loop"],
                hint=f"raise max_trips, for example While(..., max_trips={2 * max(self.trips, 1)})",
            )


@dataclass(frozen=True)
class BufferBound:
    """A result of a program that is 1 if a position is outside a buffer, such as a cache of keys and values."""

    name: str
    owner: str
    size: int
    where: str

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    def raise_if_violated(self, values: Sequence[Any], sizes: Mapping[str, int]) -> None:
        """Raise InputError if a position was outside the buffer."""
        if np.any(values[0]):
            raise InputError(
                f"'{self.owner}' holds {self.size} positions, and this call exceeds them",
                facts=[self.where, f"accepted: position + number of new tokens <= {self.size}"],
                hint="restart at position 0 with initial_state(), or create the layer with more positions",
            )


KINDS = {kind.__name__: kind for kind in (Bound, BufferBound)}  # by the name in cached programs


def with_bounds(graph: Graph) -> tuple[Graph, list[Bound | BufferBound]]:
    """Return the graph with the flags as results, and a ``Bound`` or ``Room`` for each."""
    if not any(_is_checked(node) for node, _ in iterate(graph)):
        return graph, []
    marked, flags = _with_flags(graph)
    bounds: list[Bound | BufferBound] = []
    extra: list[Output] = []
    for node, flag in flags:
        extra.append(result("check", f"bound/{len(bounds)}", flag))
        name = extra[-1].name
        if BOUNDED in node.tags:
            bounds.append(Bound(name, node.tags[BOUNDED], node.attributes["max_trips"], str(node.origin)))
        elif REACHED in node.tags:
            trips, _, loop = node.tags[REACHED].partition(" ")
            bounds.append(Bound(name, loop, int(trips), str(node.origin)))
        else:
            size, _, owner = node.tags[PLACES].partition(" ")
            bounds.append(BufferBound(name, owner, int(size), str(node.origin)))
    return marked.replaced(results=(*marked.results, *extra)), bounds


def _is_checked(node: Node) -> bool:
    return not node.tags.keys().isdisjoint(CHECKS)


def _with_flags(graph: Graph) -> tuple[Graph, list[tuple[Node, Value]]]:
    """Return the graph with a flag for each node that is or contains a bounded loop or a position."""
    from mithril import ops

    editor = graph.edit()
    flags: list[tuple[Node, Value]] = []
    for node, following in zip(graph.nodes, [*graph.nodes[1:], None], strict=False):  # a branch may have no nodes
        inner = (n for region in node.regions for n, _ in iterate(region))
        loop = next((n for n in inner if _is_checked(n)), None)
        parts: list[Value] = []
        if loop is not None:
            with editor.before(node) as builder:
                wider, flag = _with_region_flag(node, builder)
            node = editor.replace_node(node, wider)
            parts.append(flag)
        if BOUNDED in node.tags:
            count = node.attributes["states"]
            with editor.before(following) as builder:
                (holds,) = builder.inline(node.regions[0], [*node.results[:count], *node.operands[count:]])
                parts.append(ops.cast(holds, dtype=FLAG.dtype))
        if REACHED in node.tags:
            with editor.before(following):
                parts.append(ops.cast(ops.any(node.result), dtype=FLAG.dtype))
        if PLACES in node.tags:
            with editor.before(following):
                parts.append(_outside(node))
        if parts:
            with editor.before(following):
                flags.append((loop or node, parts[0] if len(parts) == 1 else ops.maximum(*parts)))
    return editor.freeze(), flags


def _outside(node: Node) -> Value:
    """Return the flag for positions outside their buffer."""
    from mithril import ops

    places, size = node.result, int(node.tags[PLACES].partition(" ")[0])
    invalid = ops.logical_or(ops.less(places, 0), ops.greater_equal(places, size))
    flag: Value = ops.cast(ops.any(invalid), dtype=FLAG.dtype)
    return flag


def _with_region_flag(node: Node, builder: Builder) -> tuple[Node, Value]:
    """Add a result to the node: the flag of the loops in its regions."""
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
    """Add the flag to the outputs of a region (except a condition) and, with ``place``, to its inputs."""
    from mithril import ops

    marked, flags = _with_flags(region)
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
    # A graph that was read from a file may have such an output from its export.
    name = next(n for k in range(len(changed.results) + 1) if (n := f"cut_off_{k}") not in changed.output_names)
    widened: Graph = changed.replaced(
        inputs=(*inputs, *changed.inputs[len(marked.inputs) :]),
        results=(*changed.results[:position], Output(flag, name), *changed.results[position:]),
    )
    return widened
