"""Gradients of control flow: ``if`` branch by branch, ``scan`` by a scan backwards, bounded ``while`` as a scan.

A rule receives the walk, the node and the cotangents of its results (None if zero) and yields pairs of an operand and
its cotangent.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from mithril.derivatives.reverse import Derivative, Reverse, differentiable_values, differentiate, live_nodes
from mithril.graph import (
    BOUNDED,
    REACHED,
    Builder,
    GradientError,
    Graph,
    Input,
    Node,
    Output,
    TensorType,
    Value,
    as_results,
    cotangent_name,
    is_cheap,
    operation,
    product,
)
from mithril.ops import BodyGradient, cond, if_op, scan, scan_op, while_op

Pairs = Iterator[tuple[Value, Value]]


def _differentiate(reverse: Reverse, region: Graph, of: Sequence[Value], wrt: Sequence[Value]) -> Derivative:
    derivative = differentiate(region, [(cotangent_name(v.name), v) for v in of], wrt)
    reverse.builder.guards.update(dict.fromkeys(derivative.guards))
    return derivative


def _values(region: Graph) -> list[Value]:
    return [i.value for i in region.arguments]


def _region(
    name: str, bound: Sequence[Value], nodes: Sequence[Node], outputs: Mapping[str, Value], constants: Sequence[Input]
) -> Graph:
    """Build a closed graph of existing nodes: ``bound`` are its inputs, in order, with unique names."""
    read = {v for node in nodes for v in node.operands} | set(outputs.values())
    builder = Builder(name)
    fresh: dict[Value | None, Value] = {}
    inputs = [i for i in constants if i.value in read]
    for i in inputs:
        builder.unique(i.name)
    for v in bound:
        unique_name = builder.unique(v.name)
        if unique_name != v.name:
            fresh[v] = Value(unique_name, v.type)
        inputs.append(Input(fresh.get(v, v)))
    if fresh:
        nodes = [
            n.replaced(operands=tuple(fresh.get(v, v) for v in n.operands))
            if any(v in fresh for v in n.operands)
            else n
            for n in nodes
        ]
    region_outputs = {output: fresh.get(v, v) for output, v in outputs.items()}
    return Graph(tuple(inputs), tuple(nodes), as_results(region_outputs), name)


def _constants(derivative: Derivative) -> list[Input]:
    return [i for i in derivative.inputs if i.role == "constant"]


def _zeros(t: TensorType) -> Value:
    return operation("full")(shape=t.shape, value=0.0, dtype=t.dtype)  # type: ignore[no-any-return]


# -- if -----------------------------------------------------------------------------------------------------------
@if_op.regions_vjp
def if_rule(reverse: Reverse, node: Node, cotangents: Sequence[Value | None]) -> Pairs:
    """Differentiate by an ``if`` with the same condition; each branch recomputes its residuals."""
    arrived = [k for k, c in enumerate(cotangents) if c is not None]
    rest = node.operands[1:]
    active_positions = [p for p, v in enumerate(rest) if v in reverse.active]
    parts = []
    read: set[Value | None] = set()
    for branch in node.regions:
        inputs = _values(branch)
        derivative = _differentiate(
            reverse, branch, [branch.outputs[k] for k in arrived], [inputs[p] for p in active_positions]
        )
        nodes = live_nodes((*derivative.forward, *derivative.backward), derivative.gradients)
        read.update(v for n in nodes for v in n.operands)
        read.update(derivative.gradients)
        parts.append((branch, inputs, derivative, nodes))
    # Both branches have the same operands, so that the union of the reads of both is passed to each.
    used_positions = [p for p in range(len(rest)) if any(inputs[p] in read for _, inputs, _, _ in parts)]
    regions = [
        _region(
            branch.name,
            [*(inputs[p] for p in used_positions), *derivative.cotangents],
            nodes,
            {f"grad{k}": v for k, v in enumerate(derivative.gradients)},
            _constants(derivative),
        )
        for branch, inputs, derivative, nodes in parts
    ]
    operands = [node.operands[0], *(rest[p] for p in used_positions), *(cotangents[k] for k in arrived)]
    results = reverse.builder.emit(if_op, operands, {}, regions, "chosen")
    for p, result in zip(active_positions, results, strict=True):
        operand = rest[p]
        assert operand is not None
        yield operand, result


# -- while --------------------------------------------------------------------------------------------------------
@while_op.regions_vjp
def while_rule(reverse: Reverse, node: Node, cotangents: Sequence[Value | None]) -> Pairs:
    """Convert a bounded ``while`` to a scan whose steps do nothing once the condition is false."""
    trips = node.attributes["max_trips"]
    if trips is None:
        raise GradientError(
            "a 'while' without max_trips has no gradient",
            hint="pass a bound: While(..., max_trips=...), while_loop(..., max_trips=...)",
        )
    # A graph of its own, since the scan replaces the loop in the forward part, before values that
    # exist already; its names must be unique in the whole derivative.
    stage = Builder(reverse.graph.name)
    stage._used = reverse.builder._used
    stage.origin, stage.tags = node.origin, node.tags
    condition, body = node.regions
    count = node.attributes["states"]
    captured = node.operands[count:]

    def step(states: tuple[Value, ...], _: None) -> tuple[Any, None]:
        (holds,) = Builder.current().inline(condition, [*states, *captured])
        # Once the condition is false the states no longer change, so that the steps up to the bound
        # have the gradient 1.
        after = cond(holds, lambda *s: Builder.current().inline(body, [*s, *captured]), lambda *s: s, *states)
        return after, None

    with stage:
        scan(step, node.operands[:count], length=trips)
    # The forward nodes are exchanged: readers of the loop's results read those of the scan, which has
    # saved residuals.
    *before, loop = stage.nodes
    loop = loop.replaced(results=node.results)
    stage.nodes = []
    if BOUNDED in node.tags:
        (holds,) = stage.inline(condition, [*node.results, *captured])
        producer = next(k for k, n in enumerate(stage.nodes) if any(holds is r for r in n.results))
        tags = {**stage.nodes[producer].tags, REACHED: f"{trips} {node.tags[BOUNDED]}"}
        stage.nodes[producer] = stage.nodes[producer].replaced(tags=tags)
    reverse.builder.inputs += stage.inputs
    reverse.builder.guards.update(stage.guards)
    yield from scan_rule(reverse, loop, cotangents)
    reverse.exchanged[node] = [*before, *reverse.exchanged.pop(loop, (loop,)), *stage.nodes]


# -- scan ---------------------------------------------------------------------------------------------------------
@scan_op.regions_vjp
def scan_rule(reverse: Reverse, node: Node, cotangents: Sequence[Value | None]) -> Pairs:
    """Differentiate by a reverse scan over the residuals of every forward step."""
    body = node.regions[0]
    carries = node.attributes["carries"]
    last = carries + node.attributes["sequences"]
    inputs = _values(body)
    active, flows = _active_inputs(reverse, node)
    moving = [k for k in range(carries) if inputs[k] in active]
    stacked = [k for k in range(carries, len(body.outputs)) if cotangents[k] is not None and body.outputs[k] in flows]
    wrt = [v for v in inputs if v in active]
    derivative = _differentiate(reverse, body, [body.outputs[k] for k in (*moving, *stacked)], wrt)
    gradient = dict(zip(wrt, derivative.gradients, strict=True))
    residuals = Residuals(body, derivative, carries, last)
    stacks = residuals.save(reverse, node)

    # A loop-invariant weight would get a product in each step and a sum of matrices; from stacked
    # rows it is one product of all steps (commit 254b1986).
    late = LateSums(
        derivative, {inputs[k]: gradient[inputs[k]] for k in range(last, len(inputs)) if inputs[k] in active}
    )
    shared = [k for k in range(last, len(inputs)) if inputs[k] in active and inputs[k] not in late.terms]
    inner = Builder("body")
    inner.origin, inner.tags = reverse.builder.origin, reverse.builder.tags
    # The names of all values that the backward region contains, so that the sums get others.
    for v in (
        *derivative.cotangents,
        *stacks,
        *residuals.shared,
        *(r for n in (*residuals.recomputed, *derivative.backward) for r in n.results),
    ):
        inner.unique(v.name)
    totals = [Value(inner.unique(f"sum/{inputs[k].name}"), inputs[k].type) for k in shared]
    with inner:
        sums = [operation("add")(t, gradient[inputs[k]]) for t, k in zip(totals, shared, strict=True)]
    elements = [k for k in range(carries, last) if inputs[k] in active]
    outputs = {f"carry{n}": gradient[inputs[k]] for n, k in enumerate(moving)}
    outputs |= {f"sum{n}": v for n, v in enumerate(sums)}
    outputs |= {f"grad{n}": gradient[inputs[k]] for n, k in enumerate(elements)}
    of_elements = [gradient[inputs[k]] for k in elements]
    extra = late.stacked({*stacks, *of_elements})
    outputs |= {f"term{n}": v for n, v in enumerate(extra)}
    region = _region(
        "body",
        [
            *derivative.cotangents[: len(moving)],
            *totals,
            *derivative.cotangents[len(moving) :],
            *stacks,
            *residuals.shared,
        ],
        live_nodes([*residuals.recomputed, *derivative.backward, *inner.nodes], outputs.values()),
        outputs,
        _constants(derivative),
    )
    start = [_zeros(inputs[k].type) if (c := cotangents[k]) is None else c for k in moving]
    start += [_zeros(v.type) for v in totals]
    sequences = [*(cotangents[k] for k in stacked), *stacks.values()]
    captured = [node.operands[residuals.positions[v]] for v in residuals.shared]
    counts = {
        "carries": len(start),
        "sequences": len(sequences),
        "length": node.attributes["length"],
        # The cotangent of a step depends on that of the step after it.
        "reverse": not node.attributes["reverse"],
    }
    results = iter(reverse.builder.emit(scan_op, [*start, *sequences, *captured], counts, [region], "scan"))
    of_steps = dict(stacks)
    for k in (*moving, *shared, *elements):
        operand, result = node.operands[k], next(results)
        assert operand is not None
        if k in elements:
            of_steps[gradient[inputs[k]]] = result
        yield operand, result
    of_steps.update(zip(extra, results, strict=True))
    for v in late.terms:
        operand = node.operands[residuals.positions[v]]
        assert operand is not None
        yield operand, late.total(v, of_steps)


class LateSums:
    """Cotangents of loop-invariant matrices and vectors that are summed over all steps after the scan.

    That of a weight is a product ``a^T b`` in each step, and that of a bias a sum over rows: over the rows of all steps
    it is one product, or one sum.
    """

    def __init__(self, derivative: Derivative, cotangents: Mapping[Value, Value]) -> None:
        producers = {v: n for n in derivative.backward for v in n.results}
        self.terms: dict[Value, tuple[Value, ...]] = {}
        for v, g in cotangents.items():
            terms = tuple(_rows_before_reshape(producers, t) for t in self._terms(producers, g))
            if terms:
                self.terms[v] = terms

    def _terms(self, producers: Mapping[Value, Node], g: Value) -> tuple[Value, ...]:
        node = producers.get(g)
        if node is None:
            return ()
        if node.op is operation("sum"):
            (x,) = node.operands
            is_over_rows = node.attributes["axis"] == (0,) and not node.attributes["keepdims"]
            return (x,) if x is not None and x.ndim == 2 and is_over_rows else ()
        left, b = node.operands if node.op is operation("matmul") else (None, None)
        transposed = producers.get(left) if left is not None else None
        if transposed is None or b is None or transposed.op is not operation("transpose"):
            return ()
        (a,) = transposed.operands
        is_product = a is not None and a.ndim == b.ndim == 2 and transposed.attributes["perm"] == (1, 0)
        return (a, b) if a is not None and is_product else ()

    def stacked(self, stacks: Collection[Value]) -> list[Value]:
        """Return the values of a step that the scan has to return in addition to those that are its operands."""
        return list(dict.fromkeys(v for terms in self.terms.values() for v in terms if v not in stacks))

    def total(self, v: Value, of_steps: Mapping[Value, Value]) -> Value:
        """Return the sum over all steps, from the stacked values."""
        rows = [
            operation("reshape")(x, shape=(product(x.shape[:-1]), x.shape[-1]))
            for x in (of_steps[t] for t in self.terms[v])
        ]
        if len(rows) == 1:
            return operation("sum")(rows[0], axis=(0,))  # type: ignore[no-any-return]
        return operation("matmul")(operation("transpose")(rows[0], perm=(1, 0)), rows[1])  # type: ignore[no-any-return]


def _active_inputs(reverse: Reverse, node: Node) -> tuple[set[Value], set[Value]]:
    """Return the inputs of the body through which gradients flow, and all such values, over all steps."""
    body = node.regions[0]
    inputs = _values(body)
    active = {v for v, operand in zip(inputs, node.operands, strict=True) if operand in reverse.active}
    # A carry becomes active by a value of an earlier step, so the set grows until no further step
    # adds a value.
    while True:
        flows = differentiable_values(body, active)
        carried = zip(inputs[: node.attributes["carries"]], body.outputs, strict=False)
        more = {v for v, after in carried if after in flows} - active
        if not more:
            return active, flows
        active |= more


class Residuals:
    """Residuals of a scan step: stacked, recomputed, or loop-invariant."""

    def __init__(self, body: Graph, derivative: Derivative, carries: int, last: int) -> None:
        inputs = _values(body)
        self.body, self.derivative, self.carries = body, derivative, carries
        self.positions = {v: k for k, v in enumerate(inputs)}
        constant = {i.value for i in derivative.inputs if i.role == "constant"}
        invariant = set(inputs[last:]) | constant  # in every step
        producer: dict[Value, int] = {}
        for number, node in enumerate(derivative.forward):
            producer.update((v, number) for v in node.results)
            if all(v is None or v in invariant for v in node.operands):
                invariant.update(node.results)
        available = {*derivative.cotangents, *(v for n in derivative.backward for v in n.results), *constant}
        pending = [v for n in derivative.backward for v in n.operands if v is not None]
        pending += derivative.gradients
        again: set[int] = set()
        self.stacked: list[Value] = []  # carries before the step, results of the step
        self.elements: list[tuple[Value, int]] = []  # elements of sequences, with the operand's place
        self.shared: list[Value] = []
        while pending:
            v = pending.pop()
            if v in available:
                continue
            available.add(v)
            k = self.positions.get(v)
            if k is not None:
                if k < carries:
                    self.stacked.append(v)
                elif k < last:
                    self.elements.append((v, k))
                else:
                    self.shared.append(v)
            # A stack of a value has its size times the number of steps; a cheap or loop-invariant one
            # costs less to compute again.
            elif v in invariant or is_cheap(derivative.forward[producer[v]]):  # computed again in every step
                node = derivative.forward[producer[v]]
                again.add(producer[v])
                available.update(node.results)
                pending += [o for o in node.operands if o is not None]
            else:
                self.stacked.append(v)
        self.recomputed = [derivative.forward[number] for number in sorted(again)]

    def save(self, reverse: Reverse, node: Node) -> dict[Value, Value]:
        """Return the stacks by body value; replace the forward scan by one that also returns them."""
        stacks = {v: operand for v, k in self.elements if (operand := node.operands[k]) is not None}
        saved = dict(zip(self.derivative.outputs[self.carries :], node.results[self.carries :], strict=True))
        outputs = dict(zip(self.body.output_names, self.derivative.outputs, strict=True))
        results = list(node.results)
        for v in self.stacked:
            if v not in saved:
                shape = (node.attributes["length"], *v.shape)
                saved[v] = Value(reverse.builder.unique(v.name), TensorType(v.dtype, shape))
                results.append(saved[v])
                outputs[_unused(f"kept{len(results)}", outputs)] = v
            stacks[v] = saved[v]
        region = _region(
            self.body.name, _values(self.body), self.derivative.forward, outputs, _constants(self.derivative)
        )
        reverse.exchanged[node] = (node.replaced(results=tuple(results), regions=(region,)),)
        return stacks


def _unused(name: str, used_names: Collection[str]) -> str:
    while name in used_names:
        name += "_"
    return name


def _rows_before_reshape(producers: Mapping[Value, Node], x: Value) -> Value:
    """Return the value of which ``x`` has the rows in another shape."""
    node = producers.get(x)
    source = node.operands[0] if node is not None and node.op is operation("reshape") else None
    return x if source is None or not source.shape or source.shape[-1] != x.shape[-1] else source


def body_gradients(body: Graph, wrt: Sequence[int]) -> Graph:
    """Return the cotangents of inputs of a graph with one output, whose cotangent is the last input."""
    inputs = [i.value for i in body.arguments]
    derivative = differentiate(body, [("cotangent", body.outputs[0])], [inputs[k] for k in wrt])
    nodes = live_nodes((*derivative.forward, *derivative.backward), derivative.gradients)
    results = tuple(Output(v, f"cotangent_{k}") for k, v in zip(wrt, derivative.gradients, strict=True))
    return Graph(derivative.inputs, tuple(nodes), results, body.name, derivative.guards)


BodyGradient.differentiate = staticmethod(body_gradients)
