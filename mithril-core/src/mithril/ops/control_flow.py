"""Control flow: ``if``, ``while`` and ``scan`` with regions for bodies; barriers against optimization and gradients.

The operations take what their regions read as operands; ``cond``, ``while_loop`` and ``scan`` build them from Python
functions and find out themselves what those functions read from outside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mithril.base import DType, DTypeError, OperationError, ShapeError, Size, TensorType, assume, equal
from mithril.ir import (
    Body,
    Builder,
    Graph,
    Value,
    as_tuple,
    close,
    composite,
    evaluate,
    ints,
    is_building,
    name_outputs,
    op,
    sample,
)
from mithril.ops.layout_axes import barrier_axes
from mithril.ops.shape import spread

Types = Sequence[TensorType | None]
Array = np.ndarray[Any, Any]


# -- what regions must look like ----------------------------------------------------------------------------------
def _given(op: str, types: Types) -> list[TensorType]:
    if any(t is None for t in types):
        raise OperationError(f"operation '{op}' takes no absent operands")
    return [t for t in types if t is not None]


def _regions(op: str, regions: Sequence[Graph], names: Sequence[str]) -> None:
    if len(regions) != len(names):
        raise OperationError(
            f"operation '{op}' needs {len(names)} regions, got {len(regions)}", facts=[", ".join(names)]
        )


def _takes(op: str, region: Graph, which: str, types: Sequence[TensorType]) -> None:
    """The region's inputs are these."""
    inputs = region.arguments
    if len(inputs) != len(types):
        raise OperationError(f"the {which} of '{op}' takes {len(inputs)} values, but {len(types)} are given")
    for i, t in zip(inputs, types, strict=True):
        _agree(f"the {which} of '{op}': input '{i.name}'", i.type, t, "it is given")


def _agree(what: str, found: TensorType, wanted: TensorType, why: str) -> None:
    if found.dtype is not wanted.dtype:
        hint = f"cast one of them: cast(x, dtype='{wanted.dtype}')"
        raise DTypeError(
            f"{what} is {found.dtype}, but {why} {wanted.dtype}", facts=[f"{found} and {wanted}"], hint=hint
        )
    if found.shape != wanted.shape:
        raise ShapeError(f"{what} has another shape: it is {found}, but {why} {wanted}", hint="bring both to one shape")


def _truth(op: str, what: str, found: TensorType) -> None:
    """A condition is a bool scalar."""
    if not found.dtype.is_bool:
        raise DTypeError(f"{what} of '{op}' is {found.dtype}, expected bool", facts=[str(found)], hint="compare: x > 0")
    if found.shape:
        raise ShapeError(f"{what} of '{op}' is {found}, expected a scalar", hint="reduce it with any(x) or all(x)")


def _run(region: Graph, arrays: Sequence[Array]) -> tuple[Array, ...]:
    names = [i.name for i in region.arguments]
    return tuple(evaluate(region, dict(zip(names, arrays, strict=True))).values())


# -- if -----------------------------------------------------------------------------------------------------------
def _if_infer(types: Types, attributes: Mapping[str, Any], regions: Sequence[Graph]) -> tuple[TensorType, ...]:
    _regions("if", regions, ("then", "else"))
    pred, *rest = _given("if", types)
    _truth("if", "the condition", pred)
    then, other = regions
    _takes("if", then, "then branch", rest)
    _takes("if", other, "else branch", rest)
    if len(then.outputs) != len(other.outputs):
        raise OperationError(
            f"the branches of 'if' differ: then gives {len(then.outputs)} results, else {len(other.outputs)}",
            hint="both branches return the same number of values",
        )
    for k, (a, b) in enumerate(zip(then.outputs, other.outputs, strict=True)):
        _agree(f"the branches of 'if' differ: result {k} of else", b.type, a.type, "then gives")
    return tuple(v.type for v in then.outputs)


@op(name="if", infer=_if_infer, results=(), no_axes="its regions say it")
def if_op(*operands, regions):
    """What the first region gives where the condition (operand 0) is True, else the second; both take the others."""
    return _run(regions[0] if operands[0] else regions[1], operands[1:])


def cond(pred: Any, then: Callable[..., Any], else_: Callable[..., Any], *xs: Any) -> Any:
    """``then(*xs)`` where ``pred`` is True, else ``else_(*xs)``; only the chosen one is computed.

    The functions may read values from outside. Both return as many values, of the same dtypes and shapes.
    """
    if not is_building():
        return _computed(cond, pred, then, else_, *xs)
    builder = Builder.current()
    choice, values = _value(builder, pred), [_value(builder, x) for x in xs]
    inputs = [(_stem(v, "x"), v.type) for v in values]
    bodies = [Body(name, function, inputs) for name, function in (("then", then), ("else", else_))]
    results = [as_tuple(body.returned) for body in bodies]
    if len(results[0]) != len(results[1]):
        counts = f"then gives {len(results[0])} results, else {len(results[1])}"
        raise OperationError(
            f"the branches of 'if' differ: {counts}", hint="both branches return the same number of values"
        )
    dtypes = [_first_dtype(pair) for pair in zip(*results, strict=True)]
    regions, captured = close(
        [(b, name_outputs("result", b.results(r, dtypes))) for b, r in zip(bodies, results, strict=True)]
    )
    made = builder.emit(if_op, [choice, *values, *captured], {}, regions, "chosen")
    return made if isinstance(bodies[0].returned, (tuple, list)) else made[0]


# -- while --------------------------------------------------------------------------------------------------------
BOUNDED = "bounded"  # the tag of a loop that a call may not leave at its bound, with who asked for that
PLACES = (
    "places"  # the tag of integers that must be places of a buffer, with its size and owner: "8 MultiHeadAttention"
)


def _while_infer(types: Types, attributes: Mapping[str, Any], regions: Sequence[Graph]) -> tuple[TensorType, ...]:
    _regions("while", regions, ("condition", "body"))
    given = _given("while", types)
    states = given[: _count("while", "states", attributes["states"], len(given))]
    trips = attributes["max_trips"]
    if trips is not None and trips < 0:
        raise OperationError(f"'while' cannot make at most {trips} trips")
    condition, body = regions
    _takes("while", condition, "condition", given)
    _takes("while", body, "body", given)
    if len(condition.outputs) != 1:
        raise OperationError(f"the condition of 'while' gives {len(condition.outputs)} results, expected one bool")
    _truth("while", "the condition", condition.outputs[0].type)
    _states("while", body.outputs, states)
    return tuple(states)


def _count(op: str, name: str, wanted: int, given: int) -> int:
    if not 0 <= wanted <= given:
        raise OperationError(f"'{op}' has {name}={wanted}, but {given} operands")
    return wanted


def _states(op: str, outputs: Sequence[Value], states: Sequence[TensorType]) -> None:
    if len(outputs) < len(states):
        raise OperationError(
            f"the body of '{op}' gives {len(outputs)} values, but there are {len(states)} states",
            hint="the body returns every state anew",
        )
    for k, (v, t) in enumerate(zip(outputs, states, strict=False)):
        _agree(f"state {k} of '{op}' after the body", v.type, t, "before it is")


@op(name="while", infer=_while_infer, results=(), no_axes="its regions say it")
def while_op(*operands, states: int, max_trips: int | None = None, regions):
    """States, replaced by what the body gives as long as the condition holds, at most ``max_trips`` times."""
    current, rest, trips = operands[:states], operands[states:], 0
    while (max_trips is None or trips < max_trips) and _run(regions[0], (*current, *rest))[0]:
        current, trips = _run(regions[1], (*current, *rest)), trips + 1
    return current


def while_loop(cond: Callable[..., Any], body: Callable[..., Any], init: Any, max_trips: int | None = None) -> Any:
    """``while cond(state): state = body(state)``, at most ``max_trips`` times; a tuple of states is given as a tuple.

    With ``max_trips`` it can be differentiated.
    """
    if not is_building():
        return _computed(while_loop, cond, body, init, max_trips)
    builder = Builder.current()
    several = isinstance(init, (tuple, list))
    states = [_value(builder, x) for x in as_tuple(init)]
    inputs = [(_stem(v, "state"), v.type) for v in states]
    dtypes = [v.dtype for v in states]

    def call(function: Callable[..., Any], *values: Value) -> Any:
        return function(values if several else values[0])

    test, step = Body("condition", cond, inputs, call), Body("body", body, inputs, call)
    after = as_tuple(step.returned)
    _same_count("while", after, states)
    outcome = test.results(as_tuple(test.returned), [None] * len(as_tuple(test.returned)))
    regions, captured = close(
        [(test, name_outputs("holds", outcome)), (step, name_outputs("state", step.results(after, dtypes)))]
    )
    attributes = while_op.complete({"states": len(states), "max_trips": max_trips})
    made = builder.emit(while_op, [*states, *captured], attributes, regions, "loop")
    return made if several else made[0]


def _same_count(op: str, after: Sequence[Any], before: Sequence[Any]) -> None:
    if len(after) != len(before):
        raise OperationError(
            f"the body of '{op}' gives {len(after)} states, but it was given {len(before)}",
            hint="the body returns every state anew, in the same order",
        )


# -- scan ---------------------------------------------------------------------------------------------------------
def _scan_infer(types: Types, attributes: Mapping[str, Any], regions: Sequence[Graph]) -> tuple[TensorType, ...]:
    _regions("scan", regions, ("body",))
    given = _given("scan", types)
    carries, length = attributes["carries"], attributes["length"]
    last = _count("scan", "carries + sequences", carries + attributes["sequences"], len(given))
    if not assume(0, "<=", length, "a scan has no negative length"):
        raise ShapeError(f"'scan' cannot have the length {length}")
    elements = []
    for k, t in enumerate(given[carries:last]):
        if not t.shape:
            raise ShapeError(f"sequence {k} of 'scan' is a scalar", hint="sequences have the steps as their first axis")
        if not assume(t.shape[0], "==", length, "a scan's sequences have its length"):
            raise ShapeError(
                f"sequence {k} of 'scan' has {t.shape[0]} steps, but the length is {length}", facts=[str(t)]
            )
        elements.append(TensorType(t.dtype, t.shape[1:]))
    body = regions[0]
    _takes("scan", body, "body", [*given[:carries], *elements, *given[last:]])
    _states("scan", body.outputs, given[:carries])
    stacked = [TensorType(v.dtype, (length, *v.shape)) for v in body.outputs[carries:]]
    return (*given[:carries], *stacked)


@op(name="scan", infer=_scan_infer, results=(), no_axes="its regions say it")
def scan_op(*operands, carries: int, sequences: int, length: Size, reverse: bool = False, regions):
    """The body once per step: carries go from step to step, sequences give elements, further results are stacked."""
    states = operands[:carries]
    inputs, rest = operands[carries : carries + sequences], operands[carries + sequences :]
    rows: list[tuple[Array, ...]] = []
    for step in reversed(range(length)) if reverse else range(length):
        made = _run(regions[0], (*states, *(x[step] for x in inputs), *rest))
        states = made[:carries]
        rows.append(made[carries:])
    if reverse:
        rows.reverse()
    outputs = regions[0].outputs[carries:]
    stacked = [
        np.stack([row[k] for row in rows]) if rows else np.empty((0, *map(int, v.shape)), v.dtype.numpy)
        for k, v in enumerate(outputs)
    ]
    return (*states, *stacked)


def scan(
    body: Callable[..., Any], init: Any, xs: Any = None, length: Size | None = None, reverse: bool = False
) -> tuple[Any, Any]:
    """``carry, y = body(carry, x)`` for every ``x`` along the first axis of ``xs``: the last carry and the stacked ys.

    ``init`` and ``xs`` may be tuples, which the body gets as tuples; without ``xs`` it gets None and ``length`` counts.
    ``y`` may be None, a value or a tuple. ``reverse`` goes from the last element to the first; ys keep their places.
    """
    if not is_building():
        made: tuple[Any, Any] = _computed(scan, body, init, xs, length, reverse)
        return made
    builder = Builder.current()
    states = [_value(builder, x) for x in as_tuple(init)]
    inputs = [] if xs is None else [_value(builder, x) for x in as_tuple(xs)]
    length = _length(inputs, length)
    bound = [(_stem(v, "carry"), v.type) for v in states]
    for k, x in enumerate(inputs):
        if not x.shape:
            raise ShapeError(f"sequence {k} of 'scan' is a scalar", hint="sequences have the steps as their first axis")
        bound.append((_stem(x, "x"), TensorType(x.dtype, x.shape[1:])))

    def call(function: Callable[..., Any], *values: Value) -> Any:
        carry, element = values[: len(states)], values[len(states) :]
        return function(
            carry if isinstance(init, (tuple, list)) else carry[0],
            None if xs is None else element if isinstance(xs, (tuple, list)) else element[0],
        )

    step = Body("body", body, bound, call)
    if not isinstance(step.returned, (tuple, list)) or len(step.returned) != 2:
        raise OperationError("the body of 'scan' returns a pair: the carry and what is to be stacked (or None)")
    after, y = as_tuple(step.returned[0]), step.returned[1]
    _same_count("scan", after, states)
    ys = () if y is None else as_tuple(y)
    dtypes: list[DType | None] = [v.dtype for v in states]
    outputs = step.results([*after, *ys], dtypes + [None] * len(ys))
    split = len(states)
    regions, captured = close([(step, name_outputs("carry", outputs[:split]) | name_outputs("y", outputs[split:]))])
    counts = {"carries": split, "sequences": len(inputs), "length": length, "reverse": reverse}
    results = builder.emit(scan_op, [*states, *inputs, *captured], scan_op.complete(counts), regions, "scan")
    last, stacked = results[:split], results[split:]
    return (
        last if isinstance(init, (tuple, list)) else last[0],
        None if y is None else stacked if isinstance(y, (tuple, list)) else stacked[0],
    )


def _length(inputs: Sequence[Value], length: Size | None) -> Size:
    found = next((x.shape[0] for x in inputs if x.shape), None)
    if found is None and length is None:
        raise OperationError("'scan' without sequences needs a length", hint="scan(body, init, xs) or length=8")
    if found is None or (length is not None and equal(found, length) is not True):
        assert length is not None
        return length  # where sequences differ from it, the shape rule says so
    return found


# -- helpers of all three -----------------------------------------------------------------------------------------
def _value(builder: Builder, given: Any) -> Value:
    if isinstance(given, Value):
        return given
    if isinstance(given, (bool, int, float, np.ndarray, np.generic)):
        return builder.constant(given)
    raise OperationError(
        f"control flow cannot work on a {type(given).__name__}",
        facts=[f"got {given!r}", "accepted: values, NumPy arrays, Python numbers"],
    )


def _stem(value: Value, otherwise: str) -> str:
    """What a value is called inside; constants get the name of their part."""
    return otherwise if value.name.startswith("constant") else value.name


def _first_dtype(candidates: Sequence[Any]) -> DType | None:
    return next((v.dtype for v in candidates if isinstance(v, Value)), None)


def _computed(helper: Callable[..., Any], *arguments: Any) -> Any:
    """The helper on arrays, where no graph is being built: traced and run by the references."""
    builder = Builder("control")
    with builder:
        made = helper(*arguments)
    leaves: dict[str, Value] = {}

    def collect(part: Any) -> Any:
        if isinstance(part, tuple):
            return tuple(collect(p) for p in part)
        if part is not None:
            leaves[str(len(leaves))] = part
        return part

    collect(made)
    arrays = iter(evaluate(builder.build(leaves), {}).values())

    def restore(part: Any) -> Any:
        if isinstance(part, tuple):
            return tuple(restore(p) for p in part)
        return None if part is None else next(arrays)

    return restore(made)


# -- barriers -----------------------------------------------------------------------------------------------------
@op(
    shape=lambda *xs: xs,
    dtype=lambda dtypes, _: tuple(dtypes),
    results=(),
    opaque=True,
    samples=[sample((2, 3)), sample((2, 3), ints((4,)), label="two")],
    axes=barrier_axes,
    moves=True,
)
def barrier(*xs):
    """The operands unchanged, as many results; optimization neither merges nor moves anything across it."""
    return xs


@barrier.vjp
def _(g, y, *xs):
    return g


@barrier.vmap
def _(rows, has_rows, *xs):
    return barrier(*[x if mapped else spread(x, rows) for x, mapped in zip(xs, has_rows, strict=True)])


@composite(samples=[sample((2, 3), gradient=False), sample(ints((3,)), label="int")])
def stop_gradient(x):
    """The operand unchanged; no gradient passes."""
    return x


stop_gradient.no_vjp("that is what it is for")


__all__ = [
    "BOUNDED",
    "PLACES",
    "barrier",
    "cond",
    "if_op",
    "scan",
    "scan_op",
    "stop_gradient",
    "while_loop",
    "while_op",
]
