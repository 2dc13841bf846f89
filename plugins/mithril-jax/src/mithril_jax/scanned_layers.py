"""``scan_layers``: equal layers as one loop over their stacked parameters, so that XLA compiles one of them.

Loops replace runs of equal segments in the graph of the generated program: the forward part, the backward part and the
update. A value that a segment reads is the same for all, comes from the segment before, or is an element of a stack.
Results of a loop that a later loop reads stay stacked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from mithril import ops
from mithril.graph import Builder, Decisions, Graph, Input, Node, Output, Value
from mithril.ops import scan_op
from mithril.passes import repeated_segments

SMALLEST = 16  # repeated operations below which a loop costs more than it saves

Values = tuple[Value, ...]  # one of each segment


def with_scanned_layers(graph: Graph, decisions: Decisions) -> Graph:
    """Return the graph with runs of equal layers as loops."""
    rolled = _Rolled(graph)
    if not rolled.loops:
        decisions.record("ignored", "scan_layers=True: no equal layers follow each other")
        return graph
    loops = ", ".join(f"{loop.count} x {len(loop.body)} operations" for loop in rolled.loops)
    decisions.record("choice", f"equal layers are loops: {loops}")
    return rolled.run()


@dataclass
class _Loop:
    """A run of segments, with the values that each of them reads and produces."""

    start: int
    count: int
    body: Sequence[Node]  # the first segment
    reads: list[list[Values | None]] = field(default_factory=list)  # by node and operand
    results: list[Values] = field(default_factory=list)
    carries: dict[Values, Values] = field(default_factory=dict)  # read by each segment -> produced by each
    elements: dict[Values, None] = field(default_factory=dict)
    shared: dict[Values, None] = field(default_factory=dict)
    scalars: dict[Values, None] = field(default_factory=dict)

    @property
    def stop(self) -> int:
        return self.start + self.count * len(self.body)


class _Rolled:
    """The graph with loops."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.scalars = {n.result: n for n in graph.nodes if n.is_constant}
        self.nodes = _static_first(graph)
        self.position = {v: k for k, n in enumerate(self.nodes) for v in n.results}
        self.last = {v: k for k, n in enumerate(self.nodes) for v in n.operands}
        self.last.update(dict.fromkeys(graph.outputs, len(self.nodes)))
        candidates = [self._loop(*run) for run in repeated_segments(self.nodes, SMALLEST)]
        self.loops = [loop for loop in candidates if loop is not None]
        self.element_orders = {order for loop in self.loops for read in loop.elements for order in (read, read[::-1])}
        self.in_loops = {v for loop in self.loops for values in loop.results for v in values}
        self.builder = Builder(graph.name)
        self.stacks: dict[Values, Value] = {}
        self.rows: dict[Value, list[tuple[Values, int]]] = {}  # the stacks that contain a value, and where
        self.single: dict[Value, Value] = {}  # results of loops that are not stacked

    # -- loops --------------------------------------------------------------------------------------------------------
    def _loop(self, start: int, length: int, count: int) -> _Loop | None:
        """Return the loop of a run, without segments at its ends that read other values than those between."""
        # The first layer often reads an embedding where others read the sum of the layer before, and the gradient of
        # the last one comes from the head.
        for dropped in range(count - 1):
            for first in range(dropped + 1):
                loop = self._bound(start + first * length, length, count - dropped)
                if loop is not None:
                    return loop
        return None

    def _bound(self, start: int, length: int, count: int) -> _Loop | None:
        segments = [self.nodes[start + k * length : start + (k + 1) * length] for k in range(count)]
        loop = _Loop(start, count, segments[0])
        by_place = [*zip(*segments, strict=True)]
        loop.results = [v for nodes in by_place for v in zip(*(n.results for n in nodes), strict=True)]
        produced = {v: values for values in loop.results for v in values}
        for nodes in by_place:
            reads = [None if v[0] is None else v for v in zip(*(n.operands for n in nodes), strict=True)]
            if not all(read is None or self._bind(loop, read, produced) for read in reads):
                return None
            loop.reads.append(reads)
        return loop

    def _bind(self, loop: _Loop, read: Values, produced: dict[Value, Values]) -> bool:
        """Bind the values that the segments read at one place; return whether this is possible."""
        if produced.get(read[0]) == read:
            return True
        if not any(v in produced for v in read):
            self._kind(loop, read)[read] = None
            return all(self.position.get(v, -1) < loop.start for v in read)
        # A loop passes results on to the next step only, not to later ones.
        results = produced.get(read[1], ())
        if read[0] in produced or results[:-1] != read[1:]:
            return False
        loop.carries[read] = results
        return True

    def _kind(self, loop: _Loop, read: Values) -> dict[Values, None]:
        # A number within the body is a constant of the compiled loop; as an argument it would be loaded at each step.
        numbers = {repr(self.scalars[v].attributes) if v in self.scalars else "" for v in read}
        if len(numbers) == 1 and "" not in numbers:
            return loop.scalars
        return loop.shared if all(v is read[0] for v in read) else loop.elements

    # -- the graph ----------------------------------------------------------------------------------------------------
    def run(self) -> Graph:
        for v in (*(i.value for i in self.graph.inputs), *(v for n in self.graph.nodes for v in n.results)):
            self.builder.unique(v.name)
        self.builder.nodes += self.scalars.values()
        loops = {loop.start: loop for loop in self.loops}
        k = 0
        with self.builder:
            while k < len(self.nodes):
                node = self.nodes[k]
                if k in loops:
                    with self.builder.at(node.origin, node.tags):
                        self._emit(loops[k])
                    k = loops[k].stop
                    continue
                with self.builder.at(node.origin, node.tags):
                    operands = tuple(None if v is None else self._value(v) for v in node.operands)
                self.builder.nodes.append(node.replaced(operands=operands))
                k += 1
            outputs = [self._value(v) for v in self.graph.outputs]
        inputs = (*self.graph.inputs, *self.builder.inputs)
        return self.graph.replaced(inputs=inputs, nodes=tuple(self.builder.nodes), outputs=outputs)

    def _emit(self, loop: _Loop) -> None:
        """Append the loop; its results stay stacked until a node reads one."""
        # The backward part reads results of the layers from the last to the first.
        is_reverse = sum((r[::-1] in self.stacks) - (r in self.stacks) for r in loop.elements) > 0
        step = -1 if is_reverse else 1
        final = set(loop.carries.values())
        stacked = [
            values
            for values in loop.results
            if any(self.last.get(v, -1) >= loop.stop for v in (values[:-1] if values in final else values))
        ]
        stacked += [read for read in loop.carries if read in self.element_orders]  # inputs of layers, for recomputation
        body = _body(loop, self.scalars, [*loop.carries.values(), *stacked])
        operands = [self._value(read[0]) for read in loop.carries]
        operands += [self._stack(read[::step]) for read in loop.elements]
        operands += [self._value(read[0]) for read in loop.shared]
        counts = {"carries": len(loop.carries), "sequences": len(loop.elements)}
        attributes = scan_op.complete({**counts, "length": loop.count, "reverse": is_reverse})
        results = self.builder.emit(scan_op, operands, attributes, [body], "layers")
        for values, result in zip(loop.carries.values(), results, strict=False):
            self.single[values[-1]] = result
        for values, result in zip(stacked, results[len(loop.carries) :], strict=True):
            self._remember(values[::step], result)

    # -- stacks -------------------------------------------------------------------------------------------------------
    def _remember(self, values: Values, stack: Value) -> None:
        self.stacks[values] = stack
        for k, v in enumerate(values):
            self.rows.setdefault(v, []).append((values, k))

    def _value(self, v: Value) -> Value:
        """Return a value of the graph; one that a loop has stacked is taken from the stack once."""
        if v not in self.in_loops:
            return v
        if v not in self.single:
            values, k = self.rows[v][0]
            self.single[v] = ops.reshape(self.stacks[values][k : k + 1], shape=v.shape)
        return self.single[v]

    def _stack(self, values: Values) -> Value:
        """Return values as rows of one array, in parts of stacks that contain them."""
        if values in self.stacks:
            return self.stacks[values]
        if all(v in self.scalars for v in values):
            numbers = [self.scalars[v].attributes["value"] for v in values]
            stack = self.builder.constant(np.array(numbers, values[0].dtype.numpy))
        else:
            parts, k = [], 0
            while k < len(values):
                part, count = self._part(values[k:])
                parts.append(part)
                k += count
            stack = ops.concat(*parts, axis=0) if len(parts) > 1 else parts[0]
        self._remember(values, stack)
        return stack

    def _part(self, values: Values) -> tuple[Value, int]:
        """Return the longest part of a stack that begins with these values, or the first of them as a row."""
        longest, best = 1, None
        for rows, k in self.rows.get(values[0], ()):
            for ordered, start in ((rows, k), (rows[::-1], len(rows) - 1 - k)):
                count = next((n for n, (a, b) in enumerate(zip(ordered[start:], values)) if a is not b), None)
                count = min(len(ordered) - start, len(values)) if count is None else count
                if count > longest:
                    longest, best = count, (rows, ordered is rows, start)
        if best is None:
            return ops.reshape(self._value(values[0]), shape=(1, *values[0].shape)), 1
        rows, is_in_order, start = best
        stack = self.stacks[rows] if is_in_order else ops.flip(self.stacks[rows], axis=(0,))
        return stack[start : start + longest], longest


def _body(loop: _Loop, scalars: dict[Value, Node], returned: Sequence[Values]) -> Graph:
    """Return the region of one segment, whose inputs are in the order of the loop's operands."""
    inputs = {read: Value(read[0].name, read[0].type) for read in (*loop.carries, *loop.elements, *loop.shared)}
    local = {**inputs, **{read: Value(read[0].name, read[0].type) for read in loop.scalars}}
    local.update((values, values[0]) for values in loop.results)
    nodes = [scalars[read[0]].replaced(results=(local[read],)) for read in loop.scalars]
    for node, reads in zip(loop.body, loop.reads, strict=True):
        nodes.append(node.replaced(operands=tuple(None if read is None else local[read] for read in reads)))
    outputs = tuple(Output(local[values], f"y{k}") for k, values in enumerate(returned))
    return Graph(tuple(Input(v) for v in inputs.values()), tuple(nodes), outputs, "layer")


def _static_first(graph: Graph) -> list[Node]:
    """Return the nodes without scalars, first those that depend on no argument: all layers share them."""
    arguments = {i.value for i in graph.arguments}
    depending = set(arguments)
    first, rest = [], []
    for node in graph.nodes:
        if node.is_constant:
            continue
        if any(v in depending for v in node.operands):
            depending.update(node.results)
            rest.append(node)
        else:
            first.append(node)
    return [*first, *rest]
