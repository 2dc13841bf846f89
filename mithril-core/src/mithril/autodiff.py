"""Gradients: reverse mode, from a graph to a graph that computes the outputs and the gradients.

The forward nodes stay the very same; backward nodes follow them, each with the origin of the node it belongs to. New
inputs ``grad/<output>`` are the cotangents, new outputs ``grad/<input>`` the gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from mithril.dims import Shape
from mithril.errors import GradientError, unknown
from mithril.graph import Builder, Graph, Input, Node, Value
from mithril.graph.registry import operation
from mithril.ops.decompose import decompose
from mithril.types import TensorType

PREFIX = "grad/"
BACKWARD = {"phase": "backward"}


def gradients(graph: Graph, of: Iterable[str] | None = None, wrt: Iterable[str] | None = None) -> Graph:
    """The graph with gradients of the outputs ``of`` (default: all of a float dtype) for the inputs ``wrt``
    (default: all parameters of a float dtype)."""
    graph = decompose(graph, _differentiable_whole)
    chosen = _outputs(graph, of)
    targets = _inputs(graph, wrt)
    backward = _Backward(graph, chosen, targets)
    return backward.run()


def value_and_gradients(graph: Graph, loss: str | None = None, wrt: Iterable[str] | None = None) -> Graph:
    """As ``gradients`` of one scalar output whose cotangent is 1, so that there is no further input."""
    names = [n for n, v in zip(graph.output_names, graph.outputs, strict=True) if v.dtype.is_float and v.shape == ()]
    if loss is None:
        if len(names) != 1:
            raise GradientError(
                "which output is the loss?", facts=[f"scalar outputs: {', '.join(names) or 'none'}"], hint="name it"
            )
        loss = names[0]
    made = gradients(graph, [loss], wrt)
    cotangent = made.input(PREFIX + loss)
    one = operation("constant")
    node = Node(one, (), one.complete({"value": 1.0, "dtype": cotangent.type.dtype}), (cotangent.value,))
    inputs = tuple(i for i in made.inputs if i is not cotangent)
    return made.replaced(inputs=inputs, nodes=(node, *made.nodes))


def _differentiable_whole(node: Node) -> bool:
    """Composites without a gradient of their own are differentiated through their bodies."""
    op: Any = node.op
    return not op.composite or op.gradient is not None or bool(op.gradient_reason)


def _outputs(graph: Graph, of: Iterable[str] | None) -> dict[str, Value]:
    known = dict(zip(graph.output_names, graph.outputs, strict=True))
    if of is None:
        return {n: v for n, v in known.items() if v.dtype.is_float}
    chosen = {}
    for name in of:
        if name not in known:
            what, facts, hint = unknown("output", name, list(known))
            raise GradientError(what, facts=facts, hint=hint)
        if not known[name].dtype.is_float:
            raise GradientError(f"output '{name}' is {known[name].dtype}: only floats have gradients")
        chosen[name] = known[name]
    return chosen


def _inputs(graph: Graph, wrt: Iterable[str] | None) -> list[Input]:
    if wrt is None:
        return [i for i in graph.with_role("param") if i.type.dtype.is_float]
    by_name = {i.name: i for i in graph.arguments}
    chosen = []
    for name in wrt:
        if name not in by_name:
            what, facts, hint = unknown("input to differentiate by", name, list(by_name))
            raise GradientError(what, facts=facts, hint=hint)
        if not by_name[name].type.dtype.is_float:
            raise GradientError(f"input '{name}' is {by_name[name].type.dtype}: only floats have gradients")
        chosen.append(by_name[name])
    return chosen


class _Backward:
    """One reverse walk. Only nodes between the chosen inputs and outputs are visited."""

    def __init__(self, graph: Graph, outputs: dict[str, Value], targets: Sequence[Input]) -> None:
        self.graph = graph
        self.outputs = outputs
        self.targets = targets
        self.cotangents: dict[Value, list[Value]] = {}
        self.builder = Builder(graph.name)
        self.builder.inputs = list(graph.inputs)
        for guard in graph.guards:
            self.builder.guards[guard] = None
        for i in graph.inputs:
            self.builder.unique(i.name)
        for node in graph.nodes:
            for v in node.results:
                self.builder.unique(v.name)

    def run(self) -> Graph:
        builder, graph = self.builder, self.graph
        active = self._active()
        with builder:
            for name, value in self.outputs.items():
                given = builder.input(PREFIX + name, value.shape, value.dtype)
                if value in active:
                    self.cotangents.setdefault(value, []).append(given)
            for node in reversed(graph.nodes):
                if any(v in self.cotangents for v in node.results):
                    with builder.at(node.origin, {**node.tags, **BACKWARD}):
                        self._visit(node, active)
            found = {PREFIX + i.name: self._gradient(i) for i in self.targets}
        made = builder.build({**dict(zip(graph.output_names, graph.outputs, strict=True)), **found})
        return made.replaced(nodes=(*graph.nodes, *made.nodes))

    def _active(self) -> set[Value]:
        """Float values that depend on a target."""
        active = {i.value for i in self.targets}
        for node in self.graph.nodes:
            if any(v in active for v in node.operands):
                active.update(v for v in node.results if v.dtype.is_float)
        return active

    def _visit(self, node: Node, active: set[Value]) -> None:
        wanted = [v is not None and v in active for v in node.operands]
        if not any(wanted):
            return
        op: Any = node.op
        if op.gradient is None:
            if op.gradient_reason and not node.regions:
                return  # constant wherever it has a derivative: nothing flows
            raise GradientError(f"operation '{op.name}' has no gradient", facts=[op.gradient_reason, str(node.origin)])
        cotangents = tuple(self._sum(v) if v in self.cotangents else None for v in node.results)
        made = self._apply(node, op, cotangents, wanted)
        made = made if isinstance(made, tuple) else (made,)
        if len(made) != len(node.operands):
            raise GradientError(
                f"the gradient of '{op.name}' gave {len(made)} cotangents for {len(node.operands)} operands",
                facts=[f"declared at {op.declared_at}"],
            )
        for v, cotangent, is_wanted in zip(node.operands, made, wanted, strict=True):
            if is_wanted and cotangent is not None:
                assert v is not None
                self.cotangents.setdefault(v, []).append(self._fitted(cotangent, v, op))

    def _apply(self, node: Node, op: Any, cotangents: tuple[Value | None, ...], wanted: list[bool]) -> Any:
        if node.regions:
            return op.gradient(cotangents, node.results, node, wanted)
        if len(op.results) == 1:
            return op.gradient(cotangents[0], node.results[0], *node.operands, **node.attributes)
        filled = tuple(c if c is not None else zeros(v.type) for c, v in zip(cotangents, node.results, strict=True))
        return op.gradient(filled, node.results, *node.operands, **node.attributes)

    def _fitted(self, cotangent: Any, operand: Value, op: Any) -> Value:
        """Summed back over the axes along which the operand was broadcast."""
        if not isinstance(cotangent, Value):
            cotangent = self.builder.constant(cotangent, operand.dtype)
        if cotangent.shape != operand.shape:
            cotangent = reduce_to(cotangent, operand.shape)
        if cotangent.type != operand.type:
            raise GradientError(
                f"the gradient of '{op.name}' for %{operand.name} is {cotangent.type}, expected {operand.type}",
                facts=[f"declared at {op.declared_at}"],
            )
        return cotangent

    def _sum(self, value: Value) -> Value:
        """All that reached a value, added once."""
        parts = self.cotangents[value]
        while len(parts) > 1:
            add = operation("add")
            parts = [add(*parts[k : k + 2]) if k + 1 < len(parts) else parts[k] for k in range(0, len(parts), 2)]
        self.cotangents[value] = parts
        return parts[0]

    def _gradient(self, i: Input) -> Value:
        return self._sum(i.value) if i.value in self.cotangents else zeros(i.type)


def zeros(t: TensorType) -> Value:
    """Zeros of a type, in the current graph."""
    return operation("full")(shape=t.shape, value=0.0, dtype=t.dtype)  # type: ignore[no-any-return]


def reduce_to(x: Value, shape: Shape) -> Value:
    """x summed to a shape that broadcasts to its own."""
    if len(x.shape) < len(shape) or any(d == 1 != w for d, w in zip(x.shape[len(x.shape) - len(shape) :], shape, strict=True)):
        full = operation("broadcast_to")(x, shape=_wider(x.shape, shape))
        return reduce_to(full, shape) if full.shape != shape else full
    extra = len(x.shape) - len(shape)
    if extra:
        x = operation("sum")(x, axis=tuple(range(extra)))
    axes = tuple(k for k, (d, w) in enumerate(zip(x.shape, shape, strict=True)) if w == 1 and d != 1)
    return operation("sum")(x, axis=axes, keepdims=True) if axes else x


def _wider(a: Shape, b: Shape) -> Shape:
    from mithril.ops.rules import broadcast

    return broadcast(a, b)  # type: ignore[no-any-return]
