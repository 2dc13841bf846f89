"""One reverse walk over a graph: from cotangents of its outputs to those of its inputs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mithril.graph import (
    NOWHERE,
    Builder,
    GradientError,
    Graph,
    Guard,
    Input,
    MithrilError,
    Node,
    Op,
    Shape,
    TensorType,
    Value,
    broadcast,
    collect_guards,
    decompose,
    iterate,
    operation,
    result_name,
)
from mithril.ops import BY_KERNEL

BACKWARD = {"phase": "backward"}
Lowers = Callable[[Node], bool]


@dataclass(frozen=True)
class Derivative:
    """A differentiated graph, split into forward and backward nodes."""

    inputs: tuple[Input, ...]  # those of the graph, constants of expanded composites, cotangents
    forward: tuple[Node, ...]
    backward: tuple[Node, ...]
    outputs: tuple[Value, ...]  # of the graph
    cotangents: tuple[Value, ...]  # one input per differentiated output
    gradients: tuple[Value, ...]  # one per target
    guards: tuple[Guard, ...]


def differentiate(
    graph: Graph, of: Sequence[tuple[str, Value]], wrt: Sequence[Value], lowers: Lowers | None = None
) -> Derivative:
    """Differentiate outputs (each with the name of its cotangent) by inputs; ``lowers`` is that of the backend."""
    # Composites with a rule of their own stay: their gradient is more stable and shorter than that of
    # their parts.
    expanded = decompose(graph, CompositePolicy(graph, [v for _, v in of], wrt, lowers))
    outputs = dict(zip(graph.outputs, expanded.outputs, strict=True))
    return Reverse(expanded, [(name, outputs[v]) for name, v in of], wrt).run()


def differentiable_values(graph: Graph, sources: Iterable[Value]) -> set[Value]:
    """Float values through which gradients flow to the sources."""
    active = set(sources)
    for node in graph.nodes:
        if any(v in active for v in node.operands) and not _is_constant(node.op):
            active.update(v for v in node.results if v.dtype.is_float)
    return active


def _is_constant(op: Op) -> bool:
    """Declared to have no gradient: nothing flows through it."""
    return op.gradient is None and bool(op.gradient_reason)


class CompositePolicy:
    """Predicate of nodes that are not decomposed: all but differentiated composites without a gradient rule."""

    def __init__(
        self, graph: Graph, outputs: Sequence[Value], wrt: Sequence[Value], lowers: Lowers | None = None
    ) -> None:
        self.lowers = lowers
        active = differentiable_values(graph, wrt)
        way = {v for v in outputs if v in active}
        for node in reversed(graph.nodes):
            if any(v in way for v in node.results):
                way.update(v for v in node.operands if v is not None and v in active)
        # Composites aside of the gradient need no expansion, and would be slower where the backend has
        # a kernel for them.
        self.aside = {v for node, _ in iterate(graph) for v in node.results if v not in way}

    def __call__(self, node: Node) -> bool:
        op = node.op
        has_rule = op.gradient is not None and (op not in BY_KERNEL or self._has_kernel(node))
        if not op.composite or has_rule or op.gradient_reason:
            return True
        return bool(node.results) and all(v in self.aside for v in node.results)

    def _has_kernel(self, node: Node) -> bool:
        """Whether the backend lowers the operations of the gradient rule."""
        gradient, lowers = node.op.gradient, self.lowers
        if lowers is None or gradient is None:
            return False
        with Builder() as builder:
            # The rule is applied to placeholders, since only its nodes tell which operations the backend
            # must have.
            values = [None if v is None else builder.input(v.name, v.shape, v.dtype) for v in node.operands]
            y = builder.input("y", node.result.shape, node.result.dtype)
            gradient(y, y, *values, **node.attributes)
        return all(lowers(n) for n in builder.nodes)


class Reverse:
    """The walk. Only nodes between the chosen inputs and outputs are visited; each cotangent is added up once."""

    def __init__(self, graph: Graph, of: Sequence[tuple[str, Value]], wrt: Sequence[Value]) -> None:
        self.graph, self.of, self.wrt = graph, of, wrt
        self.active = differentiable_values(graph, wrt)
        self.cotangents: dict[Value, list[Value]] = {}
        self.exchanged: dict[Node, Sequence[Node]] = {}  # forward nodes that must keep more than they did
        # Values that have their names: those of the graph, cotangents, sums that were named before.
        self.graph_values = {i.value for i in graph.inputs} | {v for node in graph.nodes for v in node.results}
        self.builder = Builder(graph.name)
        self.builder.inputs = list(graph.inputs)
        self.builder.guards = dict.fromkeys(graph.guards)
        for i in graph.inputs:
            self.builder.unique(i.name)
        for node in graph.nodes:
            for v in node.results:
                self.builder.unique(v.name)

    def run(self) -> Derivative:
        cotangent_values = []
        with self.builder as builder:
            cotangents = []
            for name, value in self.of:
                cotangent = Value(builder.unique(name), value.type)
                cotangents.append(Input(cotangent))
                cotangent_values.append(cotangent)
                self.graph_values.add(cotangent)
                if value in self.active:
                    self.cotangents.setdefault(value, []).append(cotangent)
            for node in reversed(self.graph.nodes):
                # Without a cotangent the node does not affect the outputs; without an active operand its
                # cotangents have no use.
                if any(v in self.cotangents for v in node.results) and any(v in self.active for v in node.operands):
                    with builder.at(node.origin, {**node.tags, **BACKWARD}):
                        self._visit(node)
            with builder.at(NOWHERE, BACKWARD):
                gradients = [self.sum(v) if v in self.cotangents else zeros(v.type) for v in self.wrt]
        forward: Sequence[Node] = self.graph.nodes
        if self.exchanged:
            forward = [replacement for node in forward for replacement in self.exchanged.get(node, (node,))]
        return Derivative(
            (*builder.inputs, *cotangents),
            tuple(forward),
            tuple(live_nodes(builder.nodes, gradients)),
            self.graph.outputs,
            tuple(cotangent_values),
            tuple(gradients),
            tuple(builder.guards),
        )

    # -- one node ----------------------------------------------------------------------------------------------------
    def _visit(self, node: Node) -> None:
        op = node.op
        cotangents = [self.sum(v) if v in self.cotangents else None for v in node.results]
        try:
            if op.region_gradient is not None:
                for operand, cotangent in op.region_gradient(self, node, cotangents):
                    self._add(op, operand, cotangent)
            elif op.gradient is None:
                raise GradientError(f"operation '{op.name}' has no gradient", hint=_missing_vjp_hint(op))
            else:
                self._apply(op, node, cotangents)
        except MithrilError as error:
            location = f"from {node.origin}" if str(node.origin) else ""
            raise error.with_facts(f"in the gradient of '{op.name}'", location) from error.__cause__
        # The time limit of a compilation is not a mistake of this rule.
        except TimeoutError:
            raise
        except Exception as cause:
            raise GradientError(
                f"the gradient of '{op.name}' failed: {type(cause).__name__}: {cause}",
                facts=[f"declared at {op.declared_at}", f"from {node.origin}" if str(node.origin) else ""],
            ) from cause

    def _apply(self, op: Op, node: Node, cotangents: Sequence[Value | None]) -> None:
        gradient = op.gradient
        assert gradient is not None
        if len(op.results) == 1:
            results = gradient(cotangents[0], node.results[0], *node.operands, **node.attributes)
        else:
            # Rules of several results expect the cotangents of all of them.
            filled = tuple(zeros(v.type) if c is None else c for c, v in zip(cotangents, node.results, strict=True))
            results = gradient(filled, node.results, *node.operands, **node.attributes)
        results = results if isinstance(results, (tuple, list)) else (results,)
        if len(results) != len(node.operands):
            raise GradientError(
                f"the gradient of '{op.name}' gave {len(results)} cotangents for {len(node.operands)} operands",
                facts=[f"declared at {op.declared_at}"],
            )
        for operand, cotangent in zip(node.operands, results, strict=True):
            if cotangent is not None and operand is not None:
                self._add(op, operand, cotangent)

    def _add(self, op: Op, operand: Value, cotangent: Any) -> None:
        """Add a cotangent of an operand, summed over the axes along which the operand was broadcast."""
        if operand not in self.active:
            return
        if not isinstance(cotangent, Value):
            cotangent = self.builder.constant(cotangent, operand.dtype)
        if cotangent.shape != operand.shape:
            cotangent = unbroadcast(cotangent, operand.shape)
        if cotangent.type != operand.type:
            raise GradientError(
                f"the gradient of '{op.name}' for %{operand.name} is {cotangent.type}, expected {operand.type}",
                facts=[f"declared at {op.declared_at}"],
            )
        self.cotangents.setdefault(operand, []).append(cotangent)

    def sum(self, value: Value) -> Value:
        """Sum the cotangents of a value in a balanced tree."""
        parts = self.cotangents[value]
        add = operation("add")
        while len(parts) > 1:
            # A tree has the depth log n: the sum of many readers is more exact than a chain, and its
            # additions are independent.
            parts = [add(*parts[k : k + 2]) if k + 1 < len(parts) else parts[k] for k in range(0, len(parts), 2)]
        if parts[0] not in self.graph_values:
            self.graph_values.add(parts[0])
            parts[0].name = self.builder.unique(result_name("gradient", value.name))
        return parts[0]


def _missing_vjp_hint(op: Op) -> str:
    return f"declare one with @{op.name}.vjp, or put stop_gradient(x) before it"


def live_nodes(nodes: Sequence[Node], targets: Collection[Value | None]) -> list[Node]:
    """Return the ancestors of `targets` in graph order."""
    needed = set(targets)
    live = []
    for node in reversed(nodes):
        if any(v in needed for v in node.results):
            needed.update(node.operands)
            live.append(node)
    live.reverse()
    return live


def zeros(t: TensorType) -> Value:
    """Zeros of a type, in the current graph."""
    return operation("full")(shape=t.shape, value=0.0, dtype=t.dtype)  # type: ignore[no-any-return]


def unbroadcast(x: Value, shape: Shape) -> Value:
    """x summed to a shape that broadcasts to its own; a cotangent smaller than its operand is spread first."""
    with collect_guards():  # the operation itself has assumed them already
        broadcast_shape = broadcast(x.shape, shape)
    if broadcast_shape != x.shape:
        x = operation("broadcast_to")(x, shape=broadcast_shape)
    extra = len(broadcast_shape) - len(shape)
    if extra:
        x = operation("sum")(x, axis=tuple(range(extra)))
    axes = tuple(k for k, (d, w) in enumerate(zip(x.shape, shape, strict=True)) if w == 1 and d != 1)
    if axes:
        x = operation("sum")(x, axis=axes, keepdims=True)
    # Sizes assumed equal, differently written.
    return x if x.shape == shape else operation("reshape")(x, shape=shape)
