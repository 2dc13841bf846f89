"""The graph that one device of a mesh runs, with its exchanges as operations.

One walk from the inputs to the outputs. Every value has a split and the axes over which it is a sum still to be made;
what an operation needs otherwise is gathered, cut or summed right before it. Sums stay open through what is linear.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from mithril import ops
from mithril.base import OperationError, TensorType, UnsupportedError
from mithril.ir import NOWHERE, Builder, Graph, Input, Node, Value, as_results, linear_in
from mithril.ops import if_op, scan_op
from mithril_parallel.mesh import BLOCKS, Mesh, Split, whole
from mithril_parallel.placing.rules import sizes
from mithril_parallel.sharding.control_flow import shard_if, shard_scan
from mithril_parallel.sharding.local_graph import LocalGraph, Part, Sharded
from mithril_parallel.sharding.local_rules import Local, is_zero, local
from mithril_parallel.sharding.lookups import look_up, row_by_row


def cut(
    graph: Graph,
    axes: Mapping[str, int],
    inputs: Mapping[str, Split],
    *,
    outputs: Mapping[str, Split] | None = None,
    turns: Sequence[str] = (),
) -> Sharded:
    """Cut ``graph`` for a mesh: ``inputs`` says by name which mesh axis divides which axis of an input.

    ``outputs`` says how results are wanted; the others stay as they come out, split or not. Along the axes ``turns``
    there are no devices but turns that one device takes: all that can be exchanged are sums (``mesh.chunk_sum``), and
    what reads one is done once, after all turns. So is whatever belongs to an optimizer's update.
    """
    mesh = Mesh({name: n for name, n in axes.items() if n > 1})
    return _Walk(graph, mesh, frozenset(turns) & frozenset(mesh.axes)).run(inputs, outputs or {})


class _Walk(LocalGraph):
    """Takes the nodes of the whole graph in order."""

    def run(
        self, inputs: Mapping[str, Split], outputs: Mapping[str, Split], left_open: Collection[str] = ()
    ) -> Sharded:
        for i in self.graph.inputs:
            self._input(i, inputs.get(i.name))
        self.wanted = {
            v: self._clean(outputs[name])
            for name, v in zip(self.graph.output_names, self.graph.outputs, strict=True)
            if name in outputs
        }
        with self.builder:
            for node in self.graph.nodes:
                self.step(node)
            parts: dict[str, Part] = {}
            values: list[Value] = []
            for name, v in zip(self.graph.output_names, self.graph.outputs, strict=True):
                maker = self.node = self.graph.producers.get(v)
                with self.builder.at(*((maker.origin, maker.tags) if maker is not None else (NOWHERE,))):
                    wanted = self._clean(outputs[name]) if name in outputs else None
                    values.append(self._leaving(v, wanted, name in left_open))
                parts[name] = Part(self.splits[v] if wanted is None else wanted, self.open.get(v, frozenset()))
        given = {i.name: self.splits[i.value] for i in self.graph.inputs if i.role != "constant"}
        made = Graph(
            tuple(self.builder.inputs),
            tuple(self.builder.nodes),
            self.graph.carrying(values),
            self.graph.name,
            tuple(self.builder.guards),
        )
        return Sharded(made, self.mesh, given, parts)

    def _leaving(self, v: Value, wanted: Split | None, left_open: bool) -> Value:
        """Return an output in the split that is asked for, or in its own."""
        if wanted is not None:
            return self.as_split(v, wanted)
        if left_open:
            return self.made[v]
        if any(BLOCKS in a for a in self.splits[v] if a is not None):
            plain = tuple(a if a is not None and BLOCKS not in a else None for a in self.splits[v])
            self.made[v], self.splits[v] = self.as_split(v, plain), plain
        return self.settled(v)

    def _clean(self, split: Split) -> Split:
        return tuple(a if self.mesh.size(a) > 1 else None for a in split)

    def _input(self, i: Input, split: Split | None) -> None:
        if not i.type.is_static:
            raise UnsupportedError(
                f"input '{i.name}' has a size that is not known: {i.type}",
                hint="give its shape as numbers when compiling: devices share work of known size",
            )
        chosen = self._clean(split) if split is not None else whole(len(i.type.shape))
        for k, axis in enumerate(chosen):
            if not self.mesh.divides(axis, sizes(i.value)[k]):
                raise OperationError(f"axis {k} of '{i.name}' cannot be divided by {self.mesh.size(axis)}")
        here = Value(self.builder.unique(i.name), TensorType(i.type.dtype, self.mesh.local(sizes(i.value), chosen)))
        self.builder.inputs.append(replace(i, value=here))
        self.made[i.value], self.splits[i.value] = here, chosen

    def region(
        self,
        graph: Graph,
        inputs: Mapping[str, Split],
        outputs: Mapping[str, Split],
        *,
        collecting: Collection[Value] = (),
        left_open: Collection[str] = (),
    ) -> Sharded:
        walk = _Walk(graph, self.mesh, self.turns, inside=True)
        walk.collecting.update(collecting)
        return walk.run(inputs, outputs, left_open)

    # -- one node ----------------------------------------------------------------------------------------------------
    def step(self, node: Node) -> None:
        self.node = node
        with self.builder.at(node.origin, node.tags):
            if node.op is scan_op:
                shard_scan(self, node)
            elif node.op is if_op:
                shard_if(self, node)
            elif self._stays_open(node):
                self._linear(node)
            elif not (look_up(self, node) or row_by_row(self, node)):
                self._plain(node)

    def _plain(self, node: Node) -> None:
        have = [None if v is None else self.splits[v] for v in node.operands]
        split = any(s is not None and any(s) for s in have)
        found = local(self.graph, node, have, self.mesh) if split else None
        if found is None and split and node.op.composite:
            self._apart(node)
            return
        if any(v in self.open for v in node.operands if v is not None):
            for v in node.operands:
                if v is not None:
                    self.settled(v)
            self._plain(node)  # of which some may be in parts now
            return
        if found is None:
            needs = tuple(None if v is None else whole(v.ndim) for v in node.operands)
            found = Local(needs, tuple(whole(v.ndim) for v in node.results))
        operands = [
            None if v is None or need is None else self.as_split(v, need)
            for v, need in zip(node.operands, found.needs, strict=True)
        ]
        self.emit(node, operands, found)

    def _apart(self, node: Node) -> None:
        """Cut the nodes of a composite that loses a split as a whole."""
        types = [None if v is None else v.type for v in node.operands]
        body: Graph = node.op.decompose(types, node.attributes)
        stage = Builder(body.name)
        stage.origin, stage.tags = node.origin, node.tags
        results = stage.inline(body, node.operands)
        for i in stage.inputs:
            self._input(i, None)
        outer, self.graph = self.graph, _with_body(self.graph, stage, results)
        for inner in stage.nodes:
            self.step(inner)
        self.graph = outer
        for v, result in zip(node.results, results, strict=True):
            self.made[v], self.splits[v] = self.made[result], self.splits[result]
            if result in self.open:
                self.open[v] = self.open[result]
            if result in self.once:
                self.once.add(v)

    # -- sums still to be made ----------------------------------------------------------------------------------------
    def _stays_open(self, node: Node) -> bool:
        """Whether the sums that operands wait for can as well be made of the result."""
        operands = [v for v in node.operands if v is not None and v not in self.collecting]
        waits = [self.open.get(v, frozenset()) for v in operands]
        if not any(waits) or any(len(self.graph.users.get(v, ())) > 1 for v in operands if v in self.open):
            return False
        if self.turns and self.is_once(node):
            return False
        op = node.op
        if op is ops.cast:
            return operands[0].dtype.is_float and node.result.dtype.is_float
        if op is ops.scatter_nd_add:
            into = operands[0]
            return bool(waits[2]) and not (waits[0] or waits[1]) and is_zero(self.graph, into)
        if op is ops.pad:
            return bool(node.attributes["mode"] == "constant" and node.attributes["value"] == 0)
        if len(operands) == 1:
            return bool(op.linear)
        if op.variadic or op.linear == " ".join(op.operands):  # jointly: all operands wait for the same sums
            same = bool(op.linear) and all(w == waits[0] for w in waits)
            same = same and (not op.elementwise or len({v.type for v in operands}) == 1)
            return same and all(self.splits[v] == self.splits[operands[0]] for v in operands)
        scaled = op.elementwise and len(operands) == 2 and linear_in(node, 0)  # by a number that all devices have
        return bool(scaled and waits[0] and not waits[1] and operands[1].ndim == 0)

    def _linear(self, node: Node) -> None:
        waits = next(self.open[v] for v in node.operands if v in self.open)
        have = [None if v is None else self.splits[v] for v in node.operands]
        found = local(self.graph, node, have, self.mesh)
        assert found is not None
        operands = [
            self.as_split(v, need, closed=False)
            for v, need in zip(node.operands, found.needs, strict=True)
            if v is not None and need is not None
        ]
        self.emit(node, operands, found)
        self.open[node.result] = waits | found.sums


def _with_body(graph: Graph, stage: Builder, results: Sequence[Value]) -> Graph:
    """Return the graph with a composite's body beside it, where producers and readers of its values are found."""
    return Graph((*graph.inputs, *stage.inputs), (*graph.nodes, *stage.nodes), (*graph.results, *as_results(results)))
