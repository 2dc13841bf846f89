"""SPMD partitioning: the graph that one device of a mesh runs, with its collectives as operations.

One pass from the inputs to the outputs. Every value has a split and the mesh axes over which it is a pending sum.
Operands are gathered, sliced or reduced right before the operation that requires another split. Reductions are
delayed through linear operations.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from mithril import ops
from mithril.graph import (
    NOWHERE,
    Builder,
    Graph,
    Input,
    Node,
    OperationError,
    TensorType,
    UnsupportedError,
    Value,
    as_results,
    linear_in,
    types_of,
)
from mithril.ops import if_op, scan_op
from mithril_parallel.mesh import BLOCKS, Mesh, Split, base, replicated
from mithril_parallel.placing.rules import sizes
from mithril_parallel.sharding.attention import shard_attention
from mithril_parallel.sharding.collectives import all_gather, all_reduce, cotangent
from mithril_parallel.sharding.control_flow import shard_if, shard_scan
from mithril_parallel.sharding.custom_gradients import shard_custom_gradient
from mithril_parallel.sharding.experts import shard_experts
from mithril_parallel.sharding.local_graph import INDEX, DeviceGraph, LocalGraphBuilder, Part
from mithril_parallel.sharding.local_rules import LocalRule, is_zero, local_rule
from mithril_parallel.sharding.lookups import shard_lookup, shard_row_aligned
from mithril_parallel.sharding.routed_products import come_back, shard_routed


def with_equal_cotangents(graph: Graph, differing: Iterable[str], axis: str) -> Graph:
    """Mark the sums of a device's graph along an axis; the inputs ``differing`` are not equal on its devices."""
    sums = [n for n in graph.nodes if n.op is all_reduce and n.attributes["mesh"] == axis]
    if not sums:
        return graph
    names = set(differing)
    different = {i.value for i in graph.inputs if i.name in names}
    for node in graph.nodes:
        reads_different = any(v in different for v in node.operands)
        if node.op is not cotangent and node.attributes.get("mesh") == axis:
            reads_different = node.op not in (all_reduce, all_gather)
        if reads_different:
            different.update(node.results)
    # Outputs that differ have cotangents that differ, as have all values that they are made of.
    private = different & set(graph.outputs)
    for node in reversed(graph.nodes):
        if any(v in different for v in node.operands) or any(v in private for v in node.results):
            private.update(v for v in node.operands if v is not None)
    marked = {n for n in sums if n.attributes["kind"] == "sum" and n.result not in private}
    return graph.replaced(nodes=tuple(_marked(n) if n in marked else n for n in graph.nodes))


def _marked(node: Node) -> Node:
    return node.replaced(attributes={**node.attributes, "kind": "total"})


def partition_graph(
    graph: Graph,
    axes: Mapping[str, int],
    inputs: Mapping[str, Split],
    *,
    outputs: Mapping[str, Split] | None = None,
    sequential_axes: Sequence[str] = (),
    differentiated: bool = False,
    exchanges_rows: bool = False,
    sums: Collection[str] = (),
) -> DeviceGraph:
    """Partition ``graph`` for a mesh; ``inputs`` maps names of inputs to their splits.

    ``outputs`` maps names of outputs to requested splits; other outputs keep the split of their computation. The axes
    ``sequential_axes`` count iterations on one device instead of devices: their only collective is a sum
    (``mesh.chunk_sum``), and its consumers run once, after all iterations. So does the optimizer's update.
    ``differentiated`` tells that a framework differentiates the result, with the custom gradients of operations.
    With ``exchanges_rows`` devices send each other the rows of their experts, whose number is known at run time only.
    Of the arguments ``sums`` each device has a term of a sum, and also of results of these names if they need no
    exchange before.
    """
    mesh = Mesh({name: n for name, n in axes.items() if n > 1})
    sequential = frozenset(sequential_axes) & frozenset(mesh.axes)
    partitioner = SpmdPartitioner(graph, mesh, sequential, differentiated=differentiated, exchanges_rows=exchanges_rows)
    partitioner.pending.update((i.value, frozenset(mesh.axes)) for i in graph.inputs if i.name in sums)
    return partitioner.run(inputs, outputs or {}, sums)


RULES = (shard_custom_gradient, shard_lookup, shard_row_aligned, shard_attention, shard_experts)


class SpmdPartitioner(LocalGraphBuilder):
    """Partitions the nodes of a graph in order."""

    def run(
        self, inputs: Mapping[str, Split], outputs: Mapping[str, Split], unreduced: Collection[str] = ()
    ) -> DeviceGraph:
        for i in self.graph.inputs:
            self._add_input(i, inputs.get(i.name))
        self.requested_splits = {
            v: self._effective_split(outputs[name])
            for name, v in zip(self.graph.output_names, self.graph.outputs, strict=True)
            if name in outputs
        }
        with self.builder:
            for node in self.graph.nodes:
                self.step(node)
            parts: dict[str, Part] = {}
            values: list[Value] = []
            for name, v in zip(self.graph.output_names, self.graph.outputs, strict=True):
                producer = self.node = self.graph.producers.get(v)
                with self.builder.at(*((producer.origin, producer.tags) if producer is not None else (NOWHERE,))):
                    requested = self._effective_split(outputs[name]) if name in outputs else None
                    values.append(self._output_value(v, requested, name in unreduced))
                parts[name] = Part(self.splits[v] if requested is None else requested, self.pending.get(v, frozenset()))
        input_splits = {i.name: self.splits[i.value] for i in self.graph.inputs if i.role != "constant"}
        local_graph = Graph(
            tuple(self.builder.inputs),
            tuple(self.builder.nodes),
            self.graph.carrying(values),
            self.graph.name,
            tuple(self.builder.guards),
        )
        if self.differentiated and not self.in_region:
            for axis in self.mesh.axes:
                differing = [n for n, split in input_splits.items() if any(a and base(a) == axis for a in split)]
                local_graph = with_equal_cotangents(local_graph, [*differing, INDEX + axis], axis)
        return DeviceGraph(local_graph, self.mesh, input_splits, parts)

    def _output_value(self, v: Value, requested: Split | None, unreduced: bool) -> Value:
        """Return an output in the requested split, or in its own."""
        if v in self.routed:
            come_back(self, v)
        if requested is not None:
            return self.reshard(v, requested)
        if unreduced:
            return self.local_values[v]
        if any(BLOCKS in a for a in self.splits[v] if a is not None):
            plain = tuple(a if a is not None and BLOCKS not in a else None for a in self.splits[v])
            self.local_values[v], self.splits[v] = self.reshard(v, plain), plain
        return self.reduce_pending(v)

    def _effective_split(self, split: Split) -> Split:
        return tuple(a if self.mesh.size(a) > 1 else None for a in split)

    def _add_input(self, i: Input, split: Split | None) -> None:
        if not i.type.is_static:
            raise UnsupportedError(
                f"input '{i.name}' has a symbolic size: {i.type}",
                hint=f"pass shapes={{'{i.name}': [...]}} with numbers: the work is divided at compile time",
            )
        local_split = self._effective_split(split) if split is not None else replicated(len(i.type.shape))
        for k, axis in enumerate(local_split):
            if not self.mesh.divides(axis, sizes(i.value)[k]):
                raise OperationError(f"axis {k} of '{i.name}' cannot be divided by {self.mesh.size(axis)}")
        local_value = Value(
            self.builder.unique(i.name), TensorType(i.type.dtype, self.mesh.local(sizes(i.value), local_split))
        )
        self.builder.inputs.append(replace(i, value=local_value))
        self.local_values[i.value], self.splits[i.value] = local_value, local_split

    def region(
        self,
        graph: Graph,
        inputs: Mapping[str, Split],
        outputs: Mapping[str, Split],
        *,
        accumulating: Collection[Value] = (),
        unreduced: Collection[str] = (),
    ) -> DeviceGraph:
        partitioner = SpmdPartitioner(
            graph,
            self.mesh,
            self.sequential_axes,
            differentiated=self.differentiated,
            exchanges_rows=self.exchanges_rows,
            in_region=True,
        )
        partitioner.accumulating.update(accumulating)
        return partitioner.run(inputs, outputs, unreduced)

    # -- one node ----------------------------------------------------------------------------------------------------
    def step(self, node: Node) -> None:
        self.node = node
        with self.builder.at(node.origin, node.tags):
            if shard_routed(self, node):
                return
            if node.op is scan_op:
                shard_scan(self, node)
            elif node.op is if_op:
                shard_if(self, node)
            elif self._can_delay_reduction(node):
                self._delay_reduction(node)
            elif not any(shard(self, node) for shard in RULES):
                self._partition(node)

    def _partition(self, node: Node) -> None:
        operand_splits = [None if v is None else self.splits[v] for v in node.operands]
        split = any(s is not None and any(s) for s in operand_splits)
        rule = local_rule(self.graph, node, operand_splits, self.mesh) if split else None
        if rule is None and split and node.op.composite:
            self._partition_body(node)
            return
        if any(v in self.pending for v in node.operands if v is not None):
            for v in node.operands:
                if v is not None:
                    self.reduce_pending(v)
            self._partition(node)  # a reduce-scatter may have split operands
            return
        if rule is None:
            target_splits = tuple(None if v is None else replicated(v.ndim) for v in node.operands)
            rule = LocalRule(target_splits, tuple(replicated(v.ndim) for v in node.results))
        operands = [
            None if v is None or need is None else self.reshard(v, need)
            for v, need in zip(node.operands, rule.operand_splits, strict=True)
        ]
        self.emit(node, operands, rule)

    def _partition_body(self, node: Node) -> None:
        """Partition the body of a composite that cannot preserve a split as one operation."""
        types = types_of(node.operands)
        body: Graph = node.op.decompose(types, node.attributes)
        expansion = Builder(body.name)
        expansion.origin, expansion.tags = node.origin, node.tags
        results = expansion.inline(body, [v for v in node.operands if v is not None])
        for i in expansion.inputs:
            self._add_input(i, None)
        outer, self.graph = self.graph, _with_body(self.graph, expansion, results)
        for inner in expansion.nodes:
            self.step(inner)
        self.graph = outer
        for v, result in zip(node.results, results, strict=True):
            self.local_values[v], self.splits[v] = self.local_values[result], self.splits[result]
            if result in self.pending:
                self.pending[v] = self.pending[result]
            if result in self.once:
                self.once.add(v)

    # -- pending sums -------------------------------------------------------------------------------------------------
    def _can_delay_reduction(self, node: Node) -> bool:
        """Whether pending sums of the operands can be delayed until after the node, because it is linear in them."""
        operands = [v for v in node.operands if v is not None and v not in self.accumulating]
        pending = [self.pending.get(v, frozenset()) for v in operands]
        if not any(pending) or any(len(self.graph.users.get(v, ())) > 1 for v in operands if v in self.pending):
            return False
        if self.sequential_axes and self.is_once(node):
            return False
        op = node.op
        if op is ops.cast:
            return operands[0].dtype.is_float and node.result.dtype.is_float
        if op is ops.scatter_nd_add:
            into = operands[0]
            return bool(pending[2]) and not (pending[0] or pending[1]) and is_zero(self.graph, into)
        if op is ops.pad:
            return bool(node.attributes["mode"] == "constant" and node.attributes["value"] == 0)
        if len(operands) == 1:
            return bool(op.linear)
        # Jointly linear: all operands need the same pending sums.
        if op.variadic or op.linear == " ".join(op.operands):
            is_joint = bool(op.linear) and all(w == pending[0] for w in pending)
            is_joint = is_joint and (not op.elementwise or len({v.type for v in operands}) == 1)
            return is_joint and all(self.splits[v] == self.splits[operands[0]] for v in operands)
        scaled = op.elementwise and len(operands) == 2 and linear_in(node, 0)  # by a replicated scalar
        return bool(scaled and pending[0] and not pending[1] and operands[1].ndim == 0)

    def _delay_reduction(self, node: Node) -> None:
        pending = next(self.pending[v] for v in node.operands if v in self.pending)
        operand_splits = [None if v is None else self.splits[v] for v in node.operands]
        rule = local_rule(self.graph, node, operand_splits, self.mesh)
        assert rule is not None
        operands = [
            self.reshard(v, need, reduced=False)
            for v, need in zip(node.operands, rule.operand_splits, strict=True)
            if v is not None and need is not None
        ]
        self.emit(node, operands, rule)
        self.pending[node.result] = pending | rule.sums


def _with_body(graph: Graph, expansion: Builder, results: Sequence[Value]) -> Graph:
    """Return the graph extended by a composite's body, so that producers and consumers of its values are known."""
    inputs, nodes = (*graph.inputs, *expansion.inputs), (*graph.nodes, *expansion.nodes)
    return Graph(inputs, nodes, (*graph.results, *as_results(results)))
