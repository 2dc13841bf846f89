"""Fusion opportunities of a graph, by fusion rules or as single kernels, with estimated and measured speedups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mithril import ops, plugins
from mithril.backend import BuildOptions, nbytes
from mithril.graph import Builder, Graph, Node, Output, Value
from mithril.passes import Rule, RuleSet, random_arguments
from mithril.system import time_interleaved
from mithril_mlx.backend import MlxBackend
from mithril_mlx.mlx_loader import mx
from mithril_mlx.utilities.fusion import ELIMINATE
from mithril_tools.cost_model import CostModel, costly_nodes, size_of

PLAIN = BuildOptions(jit=False)


@dataclass
class FusionOpportunity:
    """Operations that could be fused. ``measure()`` times both variants and sets ``measured_speedup``."""

    pattern: str
    operations: tuple[str, ...]
    estimated_speedup: float  # of these operations, by the cost model
    _before: Callable[[], Any] = field(repr=False)
    _after: Callable[[], Callable[[], Any]] = field(repr=False)
    measured_speedup: float | None = None

    def measure(self, seconds: float = 0.2) -> float:
        """Measure the speedup of these operations; by a fusion rule, that of the full graph."""
        times = time_interleaved({"before": self._before, "after": self._after()}, mx.eval, seconds=seconds)
        self.measured_speedup = times["before"] / times["after"]
        return self.measured_speedup


@dataclass(frozen=True)
class Rewritten:
    """A rewrite rule, and the graph after applying it."""

    rule: Rule
    graph: Graph


def rewritten(graph: Graph) -> list[Rewritten]:
    """Return the graph after each single rule that matches."""
    after = [Rewritten(rule, RuleSet(rule.name, [rule])(graph)) for rule in fusing_rules()]
    return [candidate for candidate in after if candidate.graph is not graph]


def opportunities(
    graph: Graph, candidates: Sequence[Rewritten], backend: MlxBackend, costs: CostModel
) -> list[FusionOpportunity]:
    """Return the opportunities, the best first."""
    teller = _SpeedupEstimator(graph, backend, costs)
    opportunities = [
        *(teller.by_rule(r) for r in candidates),
        *(teller.with_bias(*pair) for pair in biased_products(graph)),
        *(teller.as_kernel(nodes) for nodes in elementwise_groups(graph)),
    ]
    return sorted(opportunities, key=lambda o: -o.estimated_speedup)


def lowered(graph: Graph, backend: MlxBackend) -> Graph:
    """Decompose the graph for the backend."""
    return backend.decomposed(graph, PLAIN)


class _SpeedupEstimator:
    """An estimator of the speedup of fused subgraphs."""

    def __init__(self, graph: Graph, backend: MlxBackend, costs: CostModel) -> None:
        self.graph, self.backend, self.costs = graph, backend, costs

    def by_rule(self, candidate: Rewritten) -> FusionOpportunity:
        new_ids, before = {id(n) for n in candidate.graph.nodes}, {id(n) for n in self.graph.nodes}
        old = [n for n in costly_nodes(self.graph.nodes) if id(n) not in new_ids]
        new = [n for n in costly_nodes(candidate.graph.nodes) if id(n) not in before]
        return FusionOpportunity(
            candidate.rule.name,
            tuple(n.op.name for n in old),
            self._separate_seconds(old) / max(self._separate_seconds(new), 1e-9),
            self._call(self.graph),
            lambda: self._call(candidate.graph),
        )

    def with_bias(self, product: Node, addition: Node) -> FusionOpportunity:
        """Describe a product that can start from the bias instead of zeros: MLX's ``addmm``."""
        part = part_of([product, addition])
        arrays = {n: self.backend.array(a) for n, a in random_arguments(part).items()}
        x, w = (arrays[v.name] for v in product.operands if v is not None)
        bias = next(arrays[v.name] for v in addition.operands if v is not None and v is not product.result)
        before = self._separate_seconds([product]) + self._separate_seconds([addition])
        return FusionOpportunity(
            "matmul_add_bias",
            (product.op.name, addition.op.name),
            before / max(self._separate_seconds([product]), 1e-9),
            lambda: x @ w + bias,  # without the call of a program, which takes a tenth of the time of small products
            lambda: lambda: mx.addmm(bias, x, w),
        )

    def as_kernel(self, nodes: list[Node]) -> FusionOpportunity:
        """Estimate a fused kernel: one launch, one pass over memory, the same arithmetic."""
        per_byte = 1 / self.costs.bytes_per_second if self.costs.bytes_per_second else 0.0
        separate = [self._separate_seconds([n]) for n in nodes]
        start = self.costs.smallest
        computed = sum(max(a - per_byte * size_of(n)[1] - start, 0.0) for a, n in zip(separate, nodes, strict=True))
        inner = {v for n in nodes for v in n.results}
        captures = {v for n in nodes for v in n.operands if v is not None and v not in inner}
        once = per_byte * (sum(nbytes(v.type) for v in captures) + nbytes(nodes[-1].result.type))
        part = part_of(nodes)
        return FusionOpportunity(
            "element-wise group",
            tuple(n.op.name for n in nodes),
            sum(separate) / max(start + computed + once, 1e-9),
            self._call(part),
            lambda: self._call(part, jit=True),
        )

    def _separate_seconds(self, nodes: Sequence[Node]) -> float:
        """Return the seconds of the nodes, each run separately by the backend."""
        return sum(
            self.costs.op_seconds(n)
            for node in nodes
            for n in costly_nodes(lowered(part_of([node]), self.backend).nodes)
        )

    def _call(self, graph: Graph, *, jit: bool = False) -> Callable[[], Any]:
        arguments = {n: self.backend.array(a) for n, a in random_arguments(graph).items()}
        executable = self.backend.build(lowered(graph, self.backend), BuildOptions(jit=jit))
        return lambda: executable({}, arguments)


def elementwise_groups(graph: Graph) -> list[list[Node]]:
    """Return maximal groups of element-wise operations whose inner results have no other users."""
    groups: list[list[Node]] = []
    group_of: dict[Value, list[Node]] = {}
    outputs = set(graph.outputs)
    for node in costly_nodes(graph.nodes):
        if not node.op.elementwise:
            continue
        merged: list[Node] | None = None
        for v in node.operands:
            before = group_of.get(v) if v is not None else None
            single = before is not None and before[-1].result is v and len(graph.users[v]) == 1 and v not in outputs
            if merged is None and single and v is not None and v.type.shape == node.result.type.shape:
                merged = before
        if merged is None:
            merged = []
            groups.append(merged)
        merged.append(node)
        group_of[node.result] = merged
    return [group for group in groups if len(group) > 1]


def biased_products(graph: Graph) -> list[tuple[Node, Node]]:
    """Return products whose only user is an addition of the same shape, with that addition."""
    pairs = []
    for node in costly_nodes(graph.nodes):
        readers = graph.users[node.result] if node.op is ops.matmul and node.result not in graph.outputs else []
        addition = readers[0] if len(readers) == 1 else None
        is_bias = addition is not None and addition.op is ops.add and addition.result.type == node.result.type
        if addition is not None and is_bias and set(addition.operands) != {node.result}:
            pairs.append((node, addition))
    return pairs


def part_of(nodes: Sequence[Node]) -> Graph:
    """Extract nodes as a graph whose inputs are their captures."""
    builder = Builder("part")
    names: dict[Value, Value] = {}
    results = {v for n in nodes for v in n.results}
    with builder:
        for node in nodes:
            for v in node.operands:
                if v is not None and v not in results and v not in names:
                    names[v] = builder.input(v.name, v.type.shape, v.type.dtype)
        copies = []
        for node in nodes:
            operands = tuple(None if v is None else names.get(v, v) for v in node.operands)
            copies.append(node.replaced(operands=operands))
        builder.nodes.extend(copies)
    return Graph(tuple(builder.inputs), tuple(builder.nodes), (Output(nodes[-1].result, "result"),), "part")


def fusing_rules() -> list[Rule]:
    """Return the rules of ``MlxKernelFusion`` for quantized values, and those of the installed passes that fuse."""
    rules: list[Rule] = [ELIMINATE]
    for name, entry in plugins.passes().items():
        if entry.spec.stage in ("fuse", "specialize") and entry.spec.level is not None:
            loaded = plugins.load_pass(name)
            if isinstance(loaded, RuleSet):
                rules += loaded.rules
    return rules
