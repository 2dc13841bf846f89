"""A forward pass in chunks of the batch, for engines that differentiate each chunk by themselves.

The part of one chunk ends in values that leave it: sums over all chunks, rows, or values equal for all chunks. The rest
of the graph reads the totals and runs once. Gradients of a chunk start before all chunks are known: the cotangents of
its ends may depend on values that inputs alone determine, such as the number of targets, but on no parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mithril.derivatives import gradients
from mithril.graph import Graph, Input, Node, Output, UnsupportedError, Value, is_source
from mithril_parallel.sharding.api import CHUNK, in_chunks
from mithril_parallel.sharding.collectives import chunk_sum


@dataclass(frozen=True)
class ForwardChunks:
    """The graph of one chunk and the operations after all chunks.

    Results of ``body`` are the ends. ``axes`` maps inputs and ends to the axis that is cut into chunks; the ends in
    ``sums`` are added up, others are equal for all chunks. ``results`` maps results of the whole graph to ends;
    ``finish`` computes the others from totals of ends. ``seeds`` returns cotangents of ends from those of the results,
    and from totals of the ends ``ahead``, which depend on inputs only.
    """

    body: Graph
    axes: Mapping[str, int]
    sums: frozenset[str]
    results: Mapping[str, str]
    finish: Graph | None
    seeds: Graph | None
    ahead: Graph | None


def forward_chunks(graph: Graph, objectives: Sequence[str], chunks: int) -> ForwardChunks:
    """Cut a forward graph into chunks whose ends have cotangents for the results ``objectives``."""
    if chunks == 1:
        return ForwardChunks(graph, {}, frozenset(), {name: name for name in graph.output_names}, None, None, None)
    per_chunk = in_chunks(graph, chunks, differentiated=True)
    splits = {**per_chunk.inputs, **{name: part.split for name, part in per_chunk.outputs.items()}}
    axes = {name: split.index(CHUNK) for name, split in splits.items() if CHUNK in split}
    return _Cut(per_chunk.graph, axes).run(objectives)


class _Cut:
    """Cuts the graph of one chunk at its sums over chunks."""

    def __init__(self, graph: Graph, axes: Mapping[str, int]) -> None:
        self.graph, self.axes = graph, axes
        self.late: dict[Node, None] = {}
        self.late_values: set[Value] = set()
        for node in graph.nodes:
            if node.op is chunk_sum or any(v in self.late_values for v in node.operands):
                self.late[node] = None
                self.late_values.update(node.results)
        self.ends: dict[Value, str] = {}  # of the body, to their names
        self.totals: dict[Value, Value] = {}  # sums over chunks -> their terms

    def run(self, objectives: Sequence[str]) -> ForwardChunks:
        outputs = dict(zip(self.graph.output_names, self.graph.outputs, strict=True))
        direct = {n: self.ends.setdefault(v, n) for n, v in outputs.items() if v not in self.late_values}
        for node in self.late:
            for v in node.operands:
                if v is not None and v not in self.late_values and not self._is_known(v):
                    self.ends.setdefault(v, f"end/{v.name}")
                    if node.op is chunk_sum:
                        self.totals[node.result] = v
        direct.update({n: self.ends[self.totals[v]] for n, v in outputs.items() if v in self.totals})
        sums = frozenset(self.ends[v] for v in self.totals.values())
        body = _subgraph(self.graph, self.ends, self.ends.values())
        late = {name: v for name, v in outputs.items() if name not in direct}
        if not late:
            return ForwardChunks(body, self.axes, sums, direct, None, None, None)
        new = {v: Value(name, v.type) for v, name in self.ends.items()}
        totals = {total: new[v] for total, v in self.totals.items()}
        finish = _subgraph(self.graph, late.values(), late, {**new, **totals})
        seeds, ahead = self._seeds(finish, [name for name in objectives if name in late])
        return ForwardChunks(body, self.axes, sums, direct, finish, seeds, ahead)

    def _is_known(self, v: Value) -> bool:
        """Whether operations after all chunks can read a value without an end: an input, or a constant."""
        i, producer = self.graph.input_of.get(v), self.graph.producers.get(v)
        return i.role != "param" if i is not None else producer is not None and is_source(producer)

    def _seeds(self, finish: Graph, objectives: Sequence[str]) -> tuple[Graph | None, Graph | None]:
        """Return the graph of the cotangents of the ends, and the one that computes the ends that it reads."""
        free = _free_values(self.graph)
        dependent = {name for v, name in self.ends.items() if v not in free and v.dtype.is_float}
        names = [i.name for i in finish.arguments if i.name in dependent]
        if not objectives or not names:
            return None, None
        full = gradients(finish, objectives, names)
        seeds = _subgraph(full, [r.value for r in full.results if r.role == "gradient"], names)
        read = {i.name for i in seeds.arguments}
        ahead = {v: name for v, name in self.ends.items() if name in read}
        for v in ahead:
            if v not in free:
                raise self._dependent_error(objectives, v)
        return seeds, _subgraph(self.graph, ahead, ahead.values()) if ahead else None

    def _dependent_error(self, objectives: Sequence[str], v: Value) -> UnsupportedError:
        producer = self.graph.producers.get(v)
        return UnsupportedError(
            f"the gradient of '{', '.join(objectives)}' depends on all chunks, and starts before the last one",
            facts=[] if producer is None else [repr(producer), str(producer.origin)],
            hint="set pipeline_chunks=1, or use a sum or a mean over the batch as the loss",
        )


def _subgraph(
    graph: Graph, values: Iterable[Value], names: Iterable[str], renamed: Mapping[Value, Value] | None = None
) -> Graph:
    """Return the graph that computes values; ``renamed`` ones are its inputs."""
    values, new = list(values), renamed or {}
    needed, nodes = {v for v in values if v not in new}, []
    read = {new[v]: None for v in values if v in new}
    for node in reversed(graph.nodes):
        if any(r in needed for r in node.results):
            operands = tuple(None if v is None else new.get(v, v) for v in node.operands)
            nodes.append(node if operands == node.operands else node.replaced(operands=operands))
            needed.update(v for v in node.operands if v is not None and v not in new)
            read.update({new[v]: None for v in node.operands if v is not None and v in new})
    inputs = [i for i in graph.inputs if i.value in needed]
    # The batch is determined from inputs, which totals are not part of.
    inputs += [Input(v, "state") for v in read]
    results = tuple(Output(new.get(v, v), n) for v, n in zip(values, names, strict=True))
    return Graph(tuple(inputs), tuple(reversed(nodes)), results, graph.name)


def _free_values(graph: Graph) -> set[Value]:
    """Return the values that depend on no parameter."""
    dependent = {i.value for i in graph.with_role("param")}
    free = {i.value for i in graph.inputs} - dependent
    for node in graph.nodes:
        (dependent if any(v in dependent for v in node.operands) else free).update(node.results)
    return free
