"""Operations on values that belong to one process of a pipeline each, such as the parameters of its stages.

Every process runs the operations on its own values and those on values that all processes have. An operation that reads
values of several processes runs everywhere: a sum adds up the terms of each process first, and one collective adds up
the processes; other values are sent to all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from mithril import ops
from mithril.graph import Builder, Graph, Node, Value, operation
from mithril_torch.parallel.layout import PIPELINE


@dataclass(frozen=True)
class OwnedPart:
    """The graph of one process; ``owners`` maps results of the whole graph to their process, or None for all."""

    graph: Graph
    owners: Mapping[str, int | None]


def part_of_process(
    graph: Graph, owners: Mapping[str, int], results: Mapping[str, int | None], rank: int, processes: int
) -> OwnedPart:
    """Return the operations of one process; ``owners`` maps inputs that a single process has to it.

    ``results`` tells which process needs a result, or None if all do; others stay where they are computed.
    """
    return _Process(graph, owners, results, rank, processes).run()


class _Process:
    def __init__(
        self,
        graph: Graph,
        owners: Mapping[str, int],
        results: Mapping[str, int | None],
        rank: int,
        processes: int,
    ) -> None:
        self.graph, self.results, self.rank, self.processes = graph, results, rank, processes
        self.builder = Builder(graph.name)
        self.owner = {i.value: owners[i.name] for i in graph.inputs if i.name in owners}
        self.terms: set[Value] = set()  # sums of which each process has a term
        self.local = {i.value: i.value for i in graph.inputs if self._is_here(i.value)}  # a missing term is zero
        self.builder.inputs += [i for i in graph.inputs if i.value in self.local]

    def _is_here(self, v: Value) -> bool:
        return self.owner.get(v, self.rank) == self.rank

    def run(self) -> OwnedPart:
        with self.builder:
            for node in self.graph.nodes:
                with self.builder.at(node.origin, node.tags):
                    self._add(node)
            for r in self.graph.results:
                owner = self.owner.get(r.value)
                if r.value in self.terms or owner not in (None, self.results.get(r.name, owner)):
                    self._join(r.value)
        owners = {r.name: self.results.get(r.name, self.owner.get(r.value)) for r in self.graph.results}
        results = [r for r in self.graph.results if owners[r.name] in (None, self.rank)]
        graph = self.builder.build([replace(r, value=self.local[r.value]) for r in results])
        return OwnedPart(graph, owners)

    def _add(self, node: Node) -> None:
        operands = [v for v in node.operands if v is not None]
        owners = {self.owner[v] for v in operands if v in self.owner}
        if node.op is ops.add and len({v.type for v in operands}) == 1 and self._has_terms(operands):
            terms = [self.local[v] for v in operands if v in self.local]
            self.terms.add(node.result)
            if terms:
                self.local[node.result] = terms[0] if len(terms) == 1 else ops.add(*terms)
            return
        mixes = len(owners) > 1 or (owners and self._decides(node))
        for v in operands:
            if v in self.terms or (mixes and v in self.owner):
                self._join(v)
        for owner in {self.owner[v] for v in operands if v in self.owner}:
            self.owner.update(dict.fromkeys(node.results, owner))
        if all(map(self._is_here, node.results)):
            self.builder.nodes.append(
                node.replaced(operands=tuple(None if v is None else self.local[v] for v in node.operands))
            )
            self.local.update((v, v) for v in node.results)

    def _decides(self, node: Node) -> bool:
        """Whether a node makes a number of values of one process and of all, on which updates of all may depend."""
        common = [v for v in node.operands if v is not None and v not in self.owner]
        is_computed = any(v in self.graph.input_of or self.graph.producers[v].operands for v in common)
        return is_computed and all(v.ndim == 0 for v in (*common, *node.results))

    def _has_terms(self, operands: list[Value]) -> bool:
        """Whether these values are terms of a sum over processes, none of which all processes have."""
        owners = {self.owner.get(v) for v in operands if v not in self.terms}
        return None not in owners and (len(owners) > 1 or any(v in self.terms for v in operands))

    def _join(self, v: Value) -> None:
        """Let all processes have a value: the sum of the values of all, of which most are zero."""
        local = self.local.get(v)
        if local is None:
            local = operation("full")(shape=v.shape, value=0, dtype=v.dtype)
        self.local[v] = operation("mesh.all_reduce")(local, mesh=PIPELINE, parts=self.processes, kind="sum")
        self.terms.discard(v)
        self.owner.pop(v, None)
