"""Batched control flow: ``if`` by selection, ``while`` until all rows have finished, ``scan`` step by step.

A region runs on all rows like a graph. Where a condition differs between rows, both branches of an ``if`` run and each
row takes its values; a ``while`` runs while the condition of any row holds, and a row whose condition fails keeps its
states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from mithril.derivatives.batching import BatchedValue, Batching, region_rules
from mithril.graph import Builder, Graph, Node, Op, TensorType, Value
from mithril.ops import any as any_of, if_op, logical_and, logical_not, reshape, scan_op, transpose, where, while_op


def _graph(
    batching: Batching,
    name: str,
    body: Callable[..., Sequence[Value]],
    inputs: Sequence[tuple[Value, BatchedValue]],
    names: Sequence[str],
) -> Graph:
    """Return the closed graph of a function of carried values; ``inputs`` are (value of one row, how it comes in).

    Which rows are active comes in as the last input, as ``_emit`` gives it.
    """
    outer = Builder.current()
    builder = Builder(name)
    builder.origin, builder.tags = outer.origin, outer.tags
    with builder:
        values = []
        for value, carried in inputs:
            shape = (batching.rows, *value.shape) if carried.has_rows else value.shape
            values.append(carried._replace(value=builder.input(value.name, shape, value.dtype)))
        active = None if batching.active is None else builder.input("active", (batching.rows,), batching.active.dtype)
        with batching.masked_by(active):
            outputs = body(*values)
    outer.guards.update(builder.guards)
    return builder.build(dict(zip(names, outputs, strict=True)))


def _fixed_point(batching: Batching, region: Graph, inputs: Sequence[BatchedValue], states: int) -> list[BatchedValue]:
    """Return the outputs of a region once each of its first inputs is carried as the output of the same number."""
    arguments = [i.value for i in region.arguments]
    inputs = list(inputs)
    while True:
        outputs: list[BatchedValue] = []
        trial = partial(_batch_region, batching, region, outputs)
        _graph(batching, region.name, trial, list(zip(arguments, inputs, strict=True)), [])
        after = [
            before._replace(has_rows=before.has_rows or new.has_rows, is_own_key=before.is_own_key or new.is_own_key)
            for before, new in zip(inputs[:states], outputs, strict=False)
        ]
        if after == inputs[:states]:
            return [*inputs[:states], *outputs[states:]]
        inputs[:states] = after


def _batch_region(batching: Batching, region: Graph, outputs: list[BatchedValue], *inputs: BatchedValue) -> list[Value]:
    """Walk to learn how the outputs are carried."""
    outputs[:] = batching.walk(region, inputs)
    return []


def _in_rows(batching: Batching, carried: Sequence[BatchedValue], rows: Sequence[bool]) -> list[Value]:
    return [batching.with_rows(c) if r else c.value for c, r in zip(carried, rows, strict=True)]


def _conjunction(a: Value, b: Value | None) -> Value:
    return a if b is None else logical_and(a, b)


def _select(choice: Value, a: Value, b: Value) -> Value:
    """a or b for each row."""
    if choice.ndim:
        choice = reshape(choice, shape=(*choice.shape, *[1] * (a.ndim - 1)))
    return where(choice, a, b)


@region_rules(if_op)
def if_rule(batching: Batching, node: Node, operands: Sequence[BatchedValue]) -> list[BatchedValue]:
    choice, *rest = operands
    if choice.has_rows:
        branches = []
        for region, takes in zip(node.regions, (choice.value, logical_not(choice.value)), strict=True):
            with batching.masked_by(_conjunction(takes, batching.active)):
                branches.append(batching.walk(region, rest))
        return [
            BatchedValue(_select(choice.value, batching.with_rows(a), batching.with_rows(b)), has_rows=True)
            for a, b in zip(*branches, strict=True)
        ]
    outputs = [_fixed_point(batching, region, rest, 0) for region in node.regions]
    rows = [a.has_rows or b.has_rows for a, b in zip(*outputs, strict=True)]
    keys = [a.is_own_key or b.is_own_key for a, b in zip(*outputs, strict=True)]

    def body(region: Graph) -> Callable[..., Sequence[Value]]:
        return lambda *values: _in_rows(batching, batching.walk(region, values), rows)

    regions = [
        _graph(
            batching,
            region.name,
            body(region),
            list(zip([i.value for i in region.arguments], rest, strict=True)),
            region.output_names,
        )
        for region in node.regions
    ]
    results = _emit(batching, node, if_op, [o.value for o in operands], {}, regions)
    return [BatchedValue(v, r, k) for v, r, k in zip(results, rows, keys, strict=True)]


@region_rules(while_op)
def while_rule(batching: Batching, node: Node, operands: Sequence[BatchedValue]) -> list[BatchedValue]:
    condition, body = node.regions
    count = node.attributes["states"]
    states, rest = list(operands[:count]), list(operands[count:])
    final = _fixed_point(batching, body, operands, count)
    (holds,) = _fixed_point(batching, condition, [*final[:count], *rest], 0)
    is_masked = holds.has_rows or batching.active is not None
    if is_masked:
        final = [s._replace(has_rows=True) for s in final]
    rows = [s.has_rows for s in final]
    states = [
        s._replace(value=v, has_rows=r) for s, v, r in zip(final, _in_rows(batching, states, rows), rows, strict=True)
    ]
    inputs = list(zip([i.value for i in body.arguments], [*states, *rest], strict=True))
    if not is_masked:
        regions = [
            _graph(
                batching, "condition", lambda *values: [batching.walk(condition, values)[0].value], inputs, ("holds",)
            ),
            _graph(
                batching,
                "body",
                lambda *values: _in_rows(batching, batching.walk(body, values)[:count], rows),
                inputs,
                body.output_names[:count],
            ),
        ]
        operands = [*states, *rest]
        results = _emit(batching, node, while_op, [o.value for o in operands], node.attributes, regions)
        return [s._replace(value=v) for s, v in zip(states, results, strict=True)]
    return _masked(batching, node, states, rest, inputs)


def _masked(
    batching: Batching,
    node: Node,
    states: Sequence[BatchedValue],
    rest: Sequence[BatchedValue],
    inputs: Sequence[tuple[Value, BatchedValue]],
) -> list[BatchedValue]:
    """Loop until all rows have finished; the first state marks the active rows."""
    condition, body = node.regions
    count = len(states)
    (first,) = batching.walk(condition, [*states, *rest])
    going = first._replace(value=_conjunction(batching.with_rows(first), batching.active), has_rows=True)
    flag = Value("going", TensorType(condition.outputs[0].dtype, ()))

    def step(goes: BatchedValue, *values: BatchedValue) -> list[Value]:
        before, captured = values[:count], values[count:]
        with batching.masked_by(goes.value):
            new = batching.walk(body, values)[:count]
        after = [_select(goes.value, batching.with_rows(n), b.value) for n, b in zip(new, before, strict=True)]
        carried = [b._replace(value=v) for b, v in zip(before, after, strict=True)]
        with batching.masked_by(goes.value):
            (again,) = batching.walk(condition, [*carried, *captured])
        return [logical_and(goes.value, batching.with_rows(again)), *after]

    bound = [(flag, going), *inputs]
    regions = [
        _graph(batching, "condition", lambda goes, *values: [any_of(goes.value)], bound, ("holds",)),
        _graph(batching, "body", step, bound, ("going", *body.output_names[:count])),
    ]
    attributes = {**node.attributes, "states": count + 1}
    values = [going.value, *(c.value for c in (*states, *rest))]
    results = _emit(batching, node, while_op, values, attributes, regions)[1:]
    return [s._replace(value=v) for s, v in zip(states, results, strict=True)]


@region_rules(scan_op)
def scan_rule(batching: Batching, node: Node, operands: Sequence[BatchedValue]) -> list[BatchedValue]:
    body = node.regions[0]
    carries = node.attributes["carries"]
    last = carries + node.attributes["sequences"]
    final = _fixed_point(batching, body, operands, carries)
    rows = [s.has_rows for s in final]
    start = _in_rows(batching, operands[:carries], rows[:carries])
    states = [s._replace(value=v) for s, v in zip(final, start, strict=False)]
    elements = [c._replace(value=_steps_first(c)) for c in operands[carries:last]]
    carried = [*states, *elements, *operands[last:]]
    region = _graph(
        batching,
        "body",
        lambda *values: _in_rows(batching, batching.walk(body, values), rows),
        list(zip([i.value for i in body.arguments], carried, strict=True)),
        body.output_names,
    )
    results = _emit(batching, node, scan_op, [c.value for c in carried], node.attributes, [region])
    outputs = [s._replace(value=v) for s, v in zip(final, results, strict=True)]
    return [*outputs[:carries], *(c._replace(value=_steps_first(c)) for c in outputs[carries:])]


def _steps_first(carried: BatchedValue) -> Value:
    """Steps and rows in exchanged places."""
    x = carried.value
    return transpose(x, perm=(1, 0, *range(2, x.ndim))) if carried.has_rows else x


def _emit(
    batching: Batching, node: Node, op: Op, operands: Sequence[Value], attributes: Any, regions: Sequence[Graph]
) -> tuple[Value, ...]:
    builder = Builder.current()
    if batching.active is not None:
        operands = [*operands, batching.active]
    return builder.emit(op, operands, dict(attributes), regions, node.results[0].name if node.results else None)
