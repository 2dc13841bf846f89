"""Gradients of control flow: ``if`` branch by branch, ``scan`` by a scan backwards, bounded ``while`` as a scan.

A rule gets the walk, the node and the cotangents of its results (None where nothing arrived) and yields pairs of an
operand and a cotangent of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from mithril.autodiff.reverse import Derivative, Reverse, depending, differentiate, living
from mithril.base import GradientError, TensorType, operation
from mithril.ir import Builder, Graph, Input, Node, Value, as_results, cotangent_name, is_cheap
from mithril.ops import cond, if_op, scan, scan_op, while_op

Pairs = Iterator[tuple[Value, Value]]


def _differentiate(reverse: Reverse, region: Graph, of: Sequence[Value], wrt: Sequence[Value]) -> Derivative:
    made = differentiate(region, [(cotangent_name(v.name), v) for v in of], wrt)
    reverse.builder.guards.update(dict.fromkeys(made.guards))
    return made


def _values(region: Graph) -> list[Value]:
    return [i.value for i in region.arguments]


def _region(
    name: str, bound: Sequence[Value], nodes: Sequence[Node], outputs: Mapping[str, Value], constants: Sequence[Input]
) -> Graph:
    """A closed graph of nodes that exist: ``bound`` are its inputs, in order, under names of their own."""
    read = {v for node in nodes for v in node.operands} | set(outputs.values())
    builder = Builder(name)
    fresh: dict[Value | None, Value] = {}
    inputs = [i for i in constants if i.value in read]
    for i in inputs:
        builder.unique(i.name)
    for v in bound:
        own = builder.unique(v.name)
        if own != v.name:
            fresh[v] = Value(own, v.type)
        inputs.append(Input(fresh.get(v, v)))
    if fresh:
        nodes = [
            n.replaced(operands=tuple(fresh.get(v, v) for v in n.operands))
            if any(v in fresh for v in n.operands)
            else n
            for n in nodes
        ]
    inside = {output: fresh.get(v, v) for output, v in outputs.items()}
    return Graph(tuple(inputs), tuple(nodes), as_results(inside), name)


def _constants(made: Derivative) -> list[Input]:
    return [i for i in made.inputs if i.role == "constant"]


def _zeros(t: TensorType) -> Value:
    return operation("full")(shape=t.shape, value=0.0, dtype=t.dtype)  # type: ignore[no-any-return]


# -- if -----------------------------------------------------------------------------------------------------------
@if_op.regions_vjp
def if_rule(reverse: Reverse, node: Node, cotangents: Sequence[Value | None]) -> Pairs:
    """An ``if`` of the same condition; each branch computes what it needs of its forward part again."""
    arrived = [k for k, c in enumerate(cotangents) if c is not None]
    rest = node.operands[1:]
    wanted = [p for p, v in enumerate(rest) if v in reverse.active]
    parts = []
    read: set[Value | None] = set()
    for branch in node.regions:
        inputs = _values(branch)
        made = _differentiate(reverse, branch, [branch.outputs[k] for k in arrived], [inputs[p] for p in wanted])
        nodes = living((*made.forward, *made.backward), made.found)
        read.update(v for n in nodes for v in n.operands)
        read.update(made.found)
        parts.append((branch, inputs, made, nodes))
    kept = [p for p in range(len(rest)) if any(inputs[p] in read for _, inputs, _, _ in parts)]
    regions = [
        _region(
            branch.name,
            [*(inputs[p] for p in kept), *made.given],
            nodes,
            {f"grad{k}": v for k, v in enumerate(made.found)},
            _constants(made),
        )
        for branch, inputs, made, nodes in parts
    ]
    operands = [node.operands[0], *(rest[p] for p in kept), *(cotangents[k] for k in arrived)]
    results = reverse.builder.emit(if_op, operands, {}, regions, "chosen")
    for p, result in zip(wanted, results, strict=True):
        operand = rest[p]
        assert operand is not None
        yield operand, result


# -- while --------------------------------------------------------------------------------------------------------
@while_op.regions_vjp
def while_rule(reverse: Reverse, node: Node, cotangents: Sequence[Value | None]) -> Pairs:
    """A bounded ``while`` becomes a scan of as many steps, which do nothing once the condition has failed."""
    trips = node.attributes["max_trips"]
    if trips is None:
        raise GradientError(
            "a 'while' without a bound on its trips has no gradient",
            hint="give one: While(..., max_trips=...), while_loop(..., max_trips=...)",
        )
    stage = Builder(reverse.graph.name)
    stage._used = reverse.builder._used
    stage.origin, stage.tags = node.origin, node.tags
    condition, body = node.regions
    count = node.attributes["states"]
    captured = node.operands[count:]

    def step(states: tuple[Value, ...], _: None) -> tuple[Any, None]:
        (holds,) = Builder.current().inline(condition, [*states, *captured])
        after = cond(holds, lambda *s: Builder.current().inline(body, [*s, *captured]), lambda *s: s, *states)
        return after, None

    with stage:
        scan(step, node.operands[:count], length=trips)
    reverse.builder.inputs += stage.inputs
    reverse.builder.guards.update(stage.guards)
    *before, made = stage.nodes
    made = made.replaced(results=node.results)
    yield from scan_rule(reverse, made, cotangents)
    reverse.exchanged[node] = [*before, *reverse.exchanged.pop(made, (made,))]


# -- scan ---------------------------------------------------------------------------------------------------------
@scan_op.regions_vjp
def scan_rule(reverse: Reverse, node: Node, cotangents: Sequence[Value | None]) -> Pairs:
    """A scan the other way round, over what the forward scan keeps of every step."""
    body = node.regions[0]
    carries = node.attributes["carries"]
    last = carries + node.attributes["sequences"]
    inputs = _values(body)
    active, flows = _active_inputs(reverse, node)
    moving = [k for k in range(carries) if inputs[k] in active]
    stacked = [k for k in range(carries, len(body.outputs)) if cotangents[k] is not None and body.outputs[k] in flows]
    wrt = [v for v in inputs if v in active]
    made = _differentiate(reverse, body, [body.outputs[k] for k in (*moving, *stacked)], wrt)
    gradient = dict(zip(wrt, made.found, strict=True))
    kept = _Kept(body, made, carries, last)
    stacks = kept.keep(reverse, node)

    shared = [k for k in range(last, len(inputs)) if inputs[k] in active]
    inner = Builder("body")
    inner.origin, inner.tags = reverse.builder.origin, reverse.builder.tags
    for v in (*made.given, *stacks, *kept.shared, *(r for n in (*kept.again, *made.backward) for r in n.results)):
        inner.unique(v.name)
    totals = [Value(inner.unique(f"sum/{inputs[k].name}"), inputs[k].type) for k in shared]
    with inner:
        sums = [operation("add")(t, gradient[inputs[k]]) for t, k in zip(totals, shared, strict=True)]
    elements = [k for k in range(carries, last) if inputs[k] in active]
    outputs = {f"carry{n}": gradient[inputs[k]] for n, k in enumerate(moving)}
    outputs |= {f"sum{n}": v for n, v in enumerate(sums)}
    outputs |= {f"grad{n}": gradient[inputs[k]] for n, k in enumerate(elements)}
    region = _region(
        "body",
        [*made.given[: len(moving)], *totals, *made.given[len(moving) :], *stacks, *kept.shared],
        [*kept.again, *made.backward, *inner.nodes],
        outputs,
        _constants(made),
    )
    start = [_zeros(inputs[k].type) if (c := cotangents[k]) is None else c for k in moving]
    start += [_zeros(v.type) for v in totals]
    sequences = [*(cotangents[k] for k in stacked), *stacks.values()]
    captured = [node.operands[kept.place[v]] for v in kept.shared]
    counts = {
        "carries": len(start),
        "sequences": len(sequences),
        "length": node.attributes["length"],
        "reverse": not node.attributes["reverse"],
    }
    results = iter(reverse.builder.emit(scan_op, [*start, *sequences, *captured], counts, [region], "scan"))
    for k in (*moving, *shared, *elements):
        operand, result = node.operands[k], next(results)
        assert operand is not None
        yield operand, result


def _active_inputs(reverse: Reverse, node: Node) -> tuple[set[Value], set[Value]]:
    """The body's inputs through which gradients flow, and all such values of the body, steps before included."""
    body = node.regions[0]
    inputs = _values(body)
    active = {v for v, outside in zip(inputs, node.operands, strict=True) if outside in reverse.active}
    while True:
        flows = depending(body, active)
        carried = zip(inputs[: node.attributes["carries"]], body.outputs, strict=False)
        more = {v for v, after in carried if after in flows} - active
        if not more:
            return active, flows
        active |= more


class _Kept:
    """What a step backwards needs of the step forwards: kept in stacks, made again, or the same in every step."""

    def __init__(self, body: Graph, made: Derivative, carries: int, last: int) -> None:
        inputs = _values(body)
        self.body, self.made, self.carries = body, made, carries
        self.place = {v: k for k, v in enumerate(inputs)}
        constant = {i.value for i in made.inputs if i.role == "constant"}
        same = set(inputs[last:]) | constant  # in every step
        producer: dict[Value, int] = {}
        for number, node in enumerate(made.forward):
            producer.update((v, number) for v in node.results)
            if all(v is None or v in same for v in node.operands):
                same.update(node.results)
        available = {*made.given, *(v for n in made.backward for v in n.results), *constant}
        pending = [v for n in made.backward for v in n.operands if v is not None]
        pending += made.found
        again: set[int] = set()
        self.stacked: list[Value] = []  # carries before the step, results of the step
        self.elements: list[tuple[Value, int]] = []  # elements of sequences, with the operand's place
        self.shared: list[Value] = []
        while pending:
            v = pending.pop()
            if v in available:
                continue
            available.add(v)
            k = self.place.get(v)
            if k is not None:
                if k < carries:
                    self.stacked.append(v)
                elif k < last:
                    self.elements.append((v, k))
                else:
                    self.shared.append(v)
            elif v in same or is_cheap(made.forward[producer[v]]):  # computed again in every step
                node = made.forward[producer[v]]
                again.add(producer[v])
                available.update(node.results)
                pending += [o for o in node.operands if o is not None]
            else:
                self.stacked.append(v)
        self.again = [made.forward[number] for number in sorted(again)]

    def keep(self, reverse: Reverse, node: Node) -> dict[Value, Value]:
        """The stacks by the value inside; the forward scan is exchanged for one that gives them."""
        stacks = {v: outside for v, k in self.elements if (outside := node.operands[k]) is not None}
        known = dict(zip(self.made.outputs[self.carries :], node.results[self.carries :], strict=True))
        outputs = dict(zip(self.body.output_names, self.made.outputs, strict=True))
        results = list(node.results)
        for v in self.stacked:
            if v not in known:
                shape = (node.attributes["length"], *v.shape)
                known[v] = Value(reverse.builder.unique(v.name), TensorType(v.dtype, shape))
                results.append(known[v])
                outputs[_unused(f"kept{len(results)}", outputs)] = v
            stacks[v] = known[v]
        region = _region(self.body.name, _values(self.body), self.made.forward, outputs, _constants(self.made))
        reverse.exchanged[node] = (node.replaced(results=tuple(results), regions=(region,)),)
        return stacks


def _unused(name: str, taken: Collection[str]) -> str:
    while name in taken:
        name += "_"
    return name
