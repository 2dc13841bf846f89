"""Where operations of a graph could be one: by the framework's fusion rules, or as one kernel; told, and measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mithril import ops, plugins
from mithril.backend.base import BuildOptions
from mithril.backend.memory_plan import nbytes
from mithril.base.interleaved_timing import in_turns
from mithril.ir import Builder, Graph, Node, Output, Value
from mithril.passes import random_arguments
from mithril.rewrite import Rule, RuleSet
from mithril_mlx.backend import MlxBackend
from mithril_mlx.mlx_loader import mx
from mithril_mlx.utilities.fusion import ELIMINATE
from mithril_tools.cost_model import CostModel, size_of, worked

PLAIN = BuildOptions(jit=False)


@dataclass
class FusionOpportunity:
    """Operations that could be one. ``measure()`` times both ways; ``measured_speedup`` has what it found."""

    pattern: str
    operations: tuple[str, ...]
    estimated_speedup: float  # of these operations, by the cost model
    _before: Callable[[], Any] = field(repr=False)
    _after: Callable[[], Callable[[], Any]] = field(repr=False)
    measured_speedup: float | None = None

    def measure(self, seconds: float = 0.2) -> float:
        """How many times as fast the whole graph is with this fusion."""
        found = in_turns({"before": self._before, "after": self._after()}, seconds=seconds)
        self.measured_speedup = found["before"] / found["after"]
        return self.measured_speedup


@dataclass(frozen=True)
class Rewritten:
    """A rule, and the graph after it."""

    rule: Rule
    graph: Graph


def rewritten(graph: Graph) -> list[Rewritten]:
    """The graph after each rule that matches somewhere, by itself."""
    after = [Rewritten(rule, RuleSet(rule.name, [rule])(graph)) for rule in fusing_rules()]
    return [found for found in after if found.graph is not graph]


def opportunities(
    graph: Graph, found: Sequence[Rewritten], backend: MlxBackend, costs: CostModel
) -> list[FusionOpportunity]:
    """The best first."""
    teller = _Teller(graph, backend, costs)
    made = [
        *(teller.by_rule(r) for r in found),
        *(teller.with_bias(*pair) for pair in biased_products(graph)),
        *(teller.as_kernel(nodes) for nodes in elementwise_groups(graph)),
    ]
    return sorted(made, key=lambda o: -o.estimated_speedup)


def lowered(graph: Graph, backend: MlxBackend) -> Graph:
    """What the backend would be given."""
    return backend.decomposed(graph, PLAIN)


class _Teller:
    """Tells how much faster a graph's parts would be."""

    def __init__(self, graph: Graph, backend: MlxBackend, costs: CostModel) -> None:
        self.graph, self.backend, self.costs = graph, backend, costs

    def by_rule(self, found: Rewritten) -> FusionOpportunity:
        kept, before = {id(n) for n in found.graph.nodes}, {id(n) for n in self.graph.nodes}
        old = [n for n in worked(self.graph.nodes) if id(n) not in kept]
        new = [n for n in worked(found.graph.nodes) if id(n) not in before]
        return FusionOpportunity(
            found.rule.name,
            tuple(n.op.name for n in old),
            self._alone(old) / max(self._alone(new), 1e-9),
            self._call(self.graph),
            lambda: self._call(found.graph),
        )

    def with_bias(self, product: Node, addition: Node) -> FusionOpportunity:
        """Describe a product that can begin with the bias instead of zeros: MLX's ``addmm``."""
        part = part_of([product, addition])
        arrays = {n: self.backend.array(a) for n, a in random_arguments(part).items()}
        x, w = (arrays[v.name] for v in product.operands if v is not None)
        bias = next(arrays[v.name] for v in addition.operands if v is not None and v is not product.result)
        before = self._alone([product]) + self._alone([addition])
        return FusionOpportunity(
            "matmul_add_bias",
            (product.op.name, addition.op.name),
            before / max(self._alone([product]), 1e-9),
            self._call(part),
            lambda: lambda: mx.addmm(bias, x, w),
        )

    def as_kernel(self, nodes: list[Node]) -> FusionOpportunity:
        """One kernel starts once, and reads and writes memory once; what it computes stays."""
        per_byte = 1 / self.costs.bytes_per_second if self.costs.bytes_per_second else 0.0
        alone = [self._alone([n]) for n in nodes]
        start = self.costs.smallest
        computed = sum(max(a - per_byte * size_of(n)[1] - start, 0.0) for a, n in zip(alone, nodes, strict=True))
        inner = {v for n in nodes for v in n.results}
        outside = {v for n in nodes for v in n.operands if v is not None and v not in inner}
        once = per_byte * (sum(nbytes(v.type) for v in outside) + nbytes(nodes[-1].result.type))
        part = part_of(nodes)
        return FusionOpportunity(
            "element-wise group",
            tuple(n.op.name for n in nodes),
            sum(alone) / max(start + computed + once, 1e-9),
            self._call(part),
            lambda: self._call(part, jit=True),
        )

    def _alone(self, nodes: Sequence[Node]) -> float:
        """Seconds of nodes, each as the backend would run it."""
        return sum(self.costs.alone(n) for node in nodes for n in worked(lowered(part_of([node]), self.backend).nodes))

    def _call(self, graph: Graph, *, jit: bool = False) -> Callable[[], Any]:
        arguments = {n: self.backend.array(a) for n, a in random_arguments(graph).items()}
        executable = self.backend.build(lowered(graph, self.backend), BuildOptions(jit=jit))
        return lambda: executable({}, arguments)


def elementwise_groups(graph: Graph) -> list[list[Node]]:
    """Rows of element-wise operations of which nobody else reads the inner results, as long as they can be."""
    groups: list[list[Node]] = []
    of: dict[Value, list[Node]] = {}
    outputs = set(graph.outputs)
    for node in worked(graph.nodes):
        if not node.op.elementwise:
            continue
        joined: list[Node] | None = None
        for v in node.operands:
            before = of.get(v) if v is not None else None
            single = before is not None and before[-1].result is v and len(graph.users[v]) == 1 and v not in outputs
            if joined is None and single and v is not None and v.type.shape == node.result.type.shape:
                joined = before
        if joined is None:
            joined = []
            groups.append(joined)
        joined.append(node)
        of[node.result] = joined
    return [group for group in groups if len(group) > 1]


def biased_products(graph: Graph) -> list[tuple[Node, Node]]:
    """Return products whose result only an addition of the same shape reads, with that addition."""
    pairs = []
    for node in worked(graph.nodes):
        readers = graph.users[node.result] if node.op is ops.matmul and node.result not in graph.outputs else []
        addition = readers[0] if len(readers) == 1 else None
        is_bias = addition is not None and addition.op is ops.add and addition.result.type == node.result.type
        if addition is not None and is_bias and set(addition.operands) != {node.result}:
            pairs.append((node, addition))
    return pairs


def part_of(nodes: Sequence[Node]) -> Graph:
    """Some nodes as a graph of their own; what they read becomes its inputs."""
    builder = Builder("part")
    names: dict[Value, Value] = {}
    made = {v for n in nodes for v in n.results}
    with builder:
        for node in nodes:
            for v in node.operands:
                if v is not None and v not in made and v not in names:
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
    for name, found in plugins.passes().items():
        if found.spec.stage in ("fuse", "specialise") and found.spec.level is not None:
            loaded = plugins.load_pass(name)
            if isinstance(loaded, RuleSet):
                rules += loaded.rules
    return rules
