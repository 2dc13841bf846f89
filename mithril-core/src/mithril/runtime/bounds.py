"""Loops that stop at their bound although their condition still holds: a call that meets one raises.

Whether that happened becomes a result of the program. Out of bodies it comes as one more result of the ``if``, one
more state of the ``while``, one more carry of the ``scan`` around it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mithril.base.dtypes import TensorType, dtype as as_dtype
from mithril.base.errors import InputError
from mithril.ir import Builder, Graph, Input, Node, Value, iterate
from mithril.ops.control_flow import BOUNDED

PREFIX = "check/bound/"
FLAG = TensorType(as_dtype("int32"), ())
STATES = {"while": "states", "scan": "carries"}  # the attribute that counts what goes from round to round


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


def with_bounds(graph: Graph) -> tuple[Graph, list[Bound]]:
    """The graph with those results, and what they mean."""
    if not any(BOUNDED in node.tags for node, _ in iterate(graph)):
        return graph, []
    made, flags = _marked(graph)
    bounds, extra = [], {}
    for loop, flag in flags:
        name = f"{PREFIX}{len(bounds)}"
        bounds.append(Bound(name, loop.tags[BOUNDED], loop.attributes["max_trips"], str(loop.origin)))
        extra[name] = flag
    outputs, names = (*made.outputs, *extra.values()), (*made.output_names, *extra)
    return made.replaced(outputs=outputs, output_names=names), bounds


def _marked(graph: Graph) -> tuple[Graph, list[tuple[Node, Value]]]:
    """The graph with a flag for each of its nodes that holds a loop that may be cut off, and that loop."""
    from mithril import ops

    editor = graph.edit()
    flags: list[tuple[Node, Value]] = []
    for node, following in zip(graph.nodes, [*graph.nodes[1:], None], strict=True):
        loop = next((n for region in node.regions for n, _ in iterate(region) if BOUNDED in n.tags), None)
        found: list[Value] = []
        if loop is not None:
            with editor.before(node) as builder:
                wider, flag = _widened(node, builder)
            node = editor.replace_node(node, wider)
            found.append(flag)
        if BOUNDED in node.tags:
            count = node.attributes["states"]
            with editor.before(following) as builder:
                (holds,) = builder.inline(node.regions[0], [*node.results[:count], *node.operands[count:]])
                found.append(ops.cast(holds, dtype=FLAG.dtype))
        if found:
            with editor.before(following):
                flags.append((loop or node, found[0] if len(found) == 1 else ops.maximum(*found)))
    return editor.freeze(), flags


def _widened(node: Node, builder: Builder) -> tuple[Node, Value]:
    """The node with one more result, which says whether a loop inside was cut off."""
    from mithril import ops

    result = Value(builder.unique("cut_off"), FLAG)
    counted = STATES.get(node.op.name)
    if counted is None:
        regions = tuple(_with_flag(region, None) for region in node.regions)
        return node.replaced(regions=regions, results=(*node.results, result)), result
    at = node.attributes[counted]
    regions = tuple(_with_flag(region, at) for region in node.regions)
    return (
        node.replaced(
            operands=(*node.operands[:at], ops.full(shape=(), value=0, dtype=FLAG.dtype), *node.operands[at:]),
            attributes={**node.attributes, counted: at + 1},
            regions=regions,
            results=(*node.results[:at], result, *node.results[at:]),
        ),
        result,
    )


def _with_flag(region: Graph, at: int | None) -> Graph:
    """A body with its flag among its outputs; ``at`` is where the flag comes in and goes out, None: out, at the end."""
    from mithril import ops

    made, flags = _marked(region)
    condition = at is not None and region.name == "condition"
    inputs = list(made.inputs)
    editor = made.edit()
    values = [flag for _, flag in flags]
    if at is not None:
        bound = [k for k, i in enumerate(inputs) if i.role != "constant"]
        taken = {i.name for i in inputs} | {v.name for n in made.nodes for v in n.results}
        name = next(n for k in range(len(taken) + 1) if (n := f"cut_off_{k}") not in taken)
        before = Value(name, FLAG)
        place = bound[at] if at < len(bound) else len(inputs)
        inputs.insert(place, Input(before))
        values.insert(0, before)
    if condition:
        return made.replaced(inputs=tuple(inputs))
    with editor.before(None):
        flag = values[0] if values else ops.full(shape=(), value=0, dtype=FLAG.dtype)
        for other in values[1:]:
            flag = ops.maximum(flag, other)
    place = len(made.outputs) if at is None else at
    changed = editor.freeze()
    return changed.replaced(
        inputs=(*inputs, *changed.inputs[len(made.inputs) :]),
        outputs=(*changed.outputs[:place], flag, *changed.outputs[place:]),
        output_names=(*changed.output_names[:place], "cut_off", *changed.output_names[place:]),
    )
