"""Control flow: ``if``, ``while`` and ``scan`` with regions; barriers against optimization and gradients.

All values that a region uses are operands of the operation. ``cond``, ``while_loop`` and ``scan`` build regions from
Python functions and add the values that these functions capture.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mithril.graph import (
    BOUNDED,
    PLACES,
    Builder,
    DType,
    DTypeError,
    Graph,
    OperationError,
    ShapeError,
    Size,
    TensorType,
    Value,
    assume,
    composite,
    equal,
    evaluate,
    ints,
    is_building,
    op,
    sample,
)
from mithril.ops.layout_axes import barrier_axes
from mithril.ops.regions import Body, as_tuple, close, name_outputs
from mithril.ops.shape import spread

Types = Sequence[TensorType | None]
Array = np.ndarray[Any, Any]


# -- checks of regions --------------------------------------------------------------------------------------------
def _operand_types(op: str, types: Types) -> list[TensorType]:
    if any(t is None for t in types):
        raise OperationError(f"operation '{op}' requires all operands, got None")
    return [t for t in types if t is not None]


def _check_regions(op: str, regions: Sequence[Graph], names: Sequence[str]) -> None:
    if len(regions) != len(names):
        raise OperationError(
            f"operation '{op}' needs {len(names)} regions, got {len(regions)}", facts=[", ".join(names)]
        )


def _check_inputs(op: str, region: Graph, which: str, types: Sequence[TensorType]) -> None:
    """Check that the inputs of a region have these types."""
    inputs = region.arguments
    if len(inputs) != len(types):
        raise OperationError(f"the {which} of '{op}' takes {len(inputs)} values, got {len(types)}")
    for i, t in zip(inputs, types, strict=True):
        _check_type(f"the {which} of '{op}': input '{i.name}'", i.type, t, "its operand is")


def _check_type(description: str, actual: TensorType, expected: TensorType, relation: str) -> None:
    if actual.dtype is not expected.dtype:
        hint = f"cast one of them: cast(x, dtype='{expected.dtype}')"
        raise DTypeError(
            f"{description} is {actual.dtype}, but {relation} {expected.dtype}",
            facts=[f"{actual} and {expected}"],
            hint=hint,
        )
    if actual.shape != expected.shape:
        raise ShapeError(
            f"{description} is {actual}, but {relation} {expected}", hint="reshape or broadcast one of them"
        )


def _check_condition(op: str, description: str, actual: TensorType) -> None:
    """Check that a condition is a bool scalar."""
    if not actual.dtype.is_bool:
        raise DTypeError(
            f"{description} of '{op}' is {actual.dtype}, expected bool", facts=[str(actual)], hint="compare: x > 0"
        )
    if actual.shape:
        raise ShapeError(
            f"{description} of '{op}' is {actual}, expected a scalar", hint="reduce it with any(x) or all(x)"
        )


def _run(region: Graph, arrays: Sequence[Array]) -> tuple[Array, ...]:
    names = [i.name for i in region.arguments]
    return tuple(evaluate(region, dict(zip(names, arrays, strict=True))).values())


# -- if -----------------------------------------------------------------------------------------------------------
def _if_infer(types: Types, attributes: Mapping[str, Any], regions: Sequence[Graph]) -> tuple[TensorType, ...]:
    _check_regions("if", regions, ("then", "else"))
    pred, *rest = _operand_types("if", types)
    _check_condition("if", "the condition", pred)
    then, other = regions
    _check_inputs("if", then, "then branch", rest)
    _check_inputs("if", other, "else branch", rest)
    if len(then.outputs) != len(other.outputs):
        raise OperationError(
            f"the branches of 'if' differ: then returns {len(then.outputs)} results, else {len(other.outputs)}",
            hint="return the same number of values from both branches",
        )
    for k, (a, b) in enumerate(zip(then.outputs, other.outputs, strict=True)):
        _check_type(f"the branches of 'if' differ: result {k} of else", b.type, a.type, "then returns")
    return tuple(v.type for v in then.outputs)


@op(name="if", infer=_if_infer, results=(), no_axes="its regions decide")
def if_op(*operands, regions):
    """The results of the first region if operand 0 is True, else of the second; both take the other operands."""
    return _run(regions[0] if operands[0] else regions[1], operands[1:])


def cond(pred: Any, then: Callable[..., Any], else_: Callable[..., Any], *xs: Any) -> Any:
    """Return ``then(*xs)`` if ``pred`` is True, else ``else_(*xs)``; only the selected branch runs.

    The functions may capture values. Both must return the same number of values, of the same dtypes and shapes.
    """
    if not is_building():
        return _evaluate(cond, pred, then, else_, *xs)
    builder = Builder.current()
    choice, values = _value(builder, pred), [_value(builder, x) for x in xs]
    inputs = [(_stem(v, "x"), v.type) for v in values]
    bodies = [Body(name, function, inputs) for name, function in (("then", then), ("else", else_))]
    results = [as_tuple(body.returned) for body in bodies]
    if len(results[0]) != len(results[1]):
        counts = f"then returns {len(results[0])} results, else {len(results[1])}"
        raise OperationError(
            f"the branches of 'if' differ: {counts}", hint="return the same number of values from both branches"
        )
    dtypes = [_first_dtype(pair) for pair in zip(*results, strict=True)]
    regions, captured = close(
        [(b, name_outputs("result", b.results(r, dtypes))) for b, r in zip(bodies, results, strict=True)]
    )
    selected = builder.emit(if_op, [choice, *values, *captured], {}, regions, "chosen")
    return selected if isinstance(bodies[0].returned, (tuple, list)) else selected[0]


# -- while --------------------------------------------------------------------------------------------------------


def _while_infer(types: Types, attributes: Mapping[str, Any], regions: Sequence[Graph]) -> tuple[TensorType, ...]:
    _check_regions("while", regions, ("condition", "body"))
    operands = _operand_types("while", types)
    states = operands[: _count("while", "states", attributes["states"], len(operands))]
    trips = attributes["max_trips"]
    if trips is not None and trips < 0:
        raise OperationError(f"'while' requires max_trips of at least 0, got {trips}")
    condition, body = regions
    _check_inputs("while", condition, "condition", operands)
    _check_inputs("while", body, "body", operands)
    if len(condition.outputs) != 1:
        raise OperationError(f"the condition of 'while' returns {len(condition.outputs)} results, expected one bool")
    _check_condition("while", "the condition", condition.outputs[0].type)
    _check_states("while", body.outputs, states)
    return tuple(states)


def _count(op: str, name: str, count: int, available: int) -> int:
    if not 0 <= count <= available:
        raise OperationError(f"'{op}' has {name}={count}, but {available} operands")
    return count


def _check_states(op: str, outputs: Sequence[Value], states: Sequence[TensorType]) -> None:
    if len(outputs) < len(states):
        raise OperationError(
            f"the body of '{op}' returns {len(outputs)} values for {len(states)} states",
            hint="return a new value for every state from the body",
        )
    for k, (v, t) in enumerate(zip(outputs, states, strict=False)):
        _check_type(f"state {k} of '{op}' after the body", v.type, t, "before it was")


@op(name="while", infer=_while_infer, results=(), no_axes="its regions decide")
def while_op(*operands, states: int, max_trips: int | None = None, regions):
    """``while condition(*states): states = body(*states)``, at most ``max_trips`` times."""
    current, rest, trips = operands[:states], operands[states:], 0
    while (max_trips is None or trips < max_trips) and _run(regions[0], (*current, *rest))[0]:
        current, trips = _run(regions[1], (*current, *rest)), trips + 1
    return current


def while_loop(cond: Callable[..., Any], body: Callable[..., Any], init: Any, max_trips: int | None = None) -> Any:
    """Run ``while cond(state): state = body(state)``, at most ``max_trips`` times, and return the last state.

    A tuple of states is passed as a tuple. Gradients require ``max_trips``.
    """
    if max_trips is not None and not isinstance(max_trips, int):
        raise OperationError(
            f"max_trips of 'while' is a number of steps, got {type(max_trips).__name__}",
            hint="several states are a tuple: while_loop(cond, body, (x, y))",
        )
    if not is_building():
        return _evaluate(while_loop, cond, body, init, max_trips)
    builder = Builder.current()
    several = isinstance(init, (tuple, list))
    states = [_value(builder, x) for x in as_tuple(init)]
    inputs = [(_stem(v, "state"), v.type) for v in states]
    dtypes = [v.dtype for v in states]

    def arguments_of(*values: Value) -> tuple[Any, ...]:
        return (values if several else values[0],)

    test, step = Body("condition", cond, inputs, arguments_of), Body("body", body, inputs, arguments_of)
    after = as_tuple(step.returned)
    _check_state_count("while", after, states)
    outcome = test.results(as_tuple(test.returned), [None] * len(as_tuple(test.returned)))
    regions, captured = close(
        [(test, name_outputs("holds", outcome)), (step, name_outputs("state", step.results(after, dtypes)))]
    )
    attributes = while_op.complete({"states": len(states), "max_trips": max_trips})
    final = builder.emit(while_op, [*states, *captured], attributes, regions, "loop")
    return final if several else final[0]


def _check_state_count(op: str, new_states: Sequence[Any], old_states: Sequence[Any]) -> None:
    if len(new_states) != len(old_states):
        raise OperationError(
            f"the body of '{op}' returns {len(new_states)} states, but takes {len(old_states)}",
            hint="return a new value for every state from the body, in the same order",
        )


# -- scan ---------------------------------------------------------------------------------------------------------
def _scan_infer(types: Types, attributes: Mapping[str, Any], regions: Sequence[Graph]) -> tuple[TensorType, ...]:
    _check_regions("scan", regions, ("body",))
    operands = _operand_types("scan", types)
    carries, length = attributes["carries"], attributes["length"]
    last = _count("scan", "carries + sequences", carries + attributes["sequences"], len(operands))
    if not assume(0, "<=", length, "the length of a scan is not negative"):
        raise ShapeError(f"'scan' requires a length of at least 0, got {length}")
    elements = []
    for k, t in enumerate(operands[carries:last]):
        if not t.shape:
            raise ShapeError(
                f"sequence {k} of 'scan' is a scalar", hint="use the first axis of sequences for the steps"
            )
        if not assume(t.shape[0], "==", length, "all sequences of a scan have its length"):
            raise ShapeError(
                f"sequence {k} of 'scan' has {t.shape[0]} steps, but the length is {length}", facts=[str(t)]
            )
        elements.append(TensorType(t.dtype, t.shape[1:]))
    body = regions[0]
    _check_inputs("scan", body, "body", [*operands[:carries], *elements, *operands[last:]])
    _check_states("scan", body.outputs, operands[:carries])
    stacked = [TensorType(v.dtype, (length, *v.shape)) for v in body.outputs[carries:]]
    return (*operands[:carries], *stacked)


@op(name="scan", infer=_scan_infer, results=(), no_axes="its regions decide")
def scan_op(*operands, carries: int, sequences: int, length: Size, reverse: bool = False, regions):
    """A loop over the first axis of the sequences: carries pass between steps, other results are stacked."""
    states = operands[:carries]
    inputs, rest = operands[carries : carries + sequences], operands[carries + sequences :]
    rows: list[tuple[Array, ...]] = []
    for step in reversed(range(length)) if reverse else range(length):
        results = _run(regions[0], (*states, *(x[step] for x in inputs), *rest))
        states = results[:carries]
        rows.append(results[carries:])
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
    """Run ``carry, y = body(carry, x)`` for each ``x`` along the first axis of ``xs``; return last carry, stacked ys.

    ``init`` and ``xs`` may be tuples, which the body receives as tuples. Without ``xs`` it receives None, and
    ``length`` is the number of steps. ``y`` is None, a value or a tuple. ``reverse`` runs from the last element to the
    first; the order of the ys does not change.
    """
    if not is_building():
        result: tuple[Any, Any] = _evaluate(scan, body, init, xs, length, reverse)
        return result
    builder = Builder.current()
    states = [_value(builder, x) for x in as_tuple(init)]
    inputs = [] if xs is None else [_value(builder, x) for x in as_tuple(xs)]
    length = _length(inputs, length)
    bound = [(_stem(v, "carry"), v.type) for v in states]
    for k, x in enumerate(inputs):
        if not x.shape:
            raise ShapeError(
                f"sequence {k} of 'scan' is a scalar", hint="use the first axis of sequences for the steps"
            )
        bound.append((_stem(x, "x"), TensorType(x.dtype, x.shape[1:])))

    def arguments_of(*values: Value) -> tuple[Any, ...]:
        carry, element = values[: len(states)], values[len(states) :]
        return (
            carry if isinstance(init, (tuple, list)) else carry[0],
            None if xs is None else element if isinstance(xs, (tuple, list)) else element[0],
        )

    step = Body("body", body, bound, arguments_of)
    if not isinstance(step.returned, (tuple, list)) or len(step.returned) != 2:
        raise OperationError("the body of 'scan' must return a pair: the carry, and the values to stack or None")
    after, y = as_tuple(step.returned[0]), step.returned[1]
    _check_state_count("scan", after, states)
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
    steps = next((x.shape[0] for x in inputs if x.shape), None)
    if steps is None and length is None:
        raise OperationError("'scan' without sequences requires a length", hint="pass xs, or length=8")
    if steps is None or (length is not None and equal(steps, length) is not True):
        assert length is not None
        return length  # the shape rule reports sequences of another length
    return steps


# -- shared helpers -----------------------------------------------------------------------------------------------
def _value(builder: Builder, operand: Any) -> Value:
    if isinstance(operand, Value):
        return operand
    if isinstance(operand, (bool, int, float, np.ndarray, np.generic)):
        return builder.constant(operand)
    raise OperationError(
        f"control flow does not support operands of type {type(operand).__name__}",
        facts=[f"got {operand!r}", "accepted: values, NumPy arrays, Python numbers"],
    )


def _stem(value: Value, otherwise: str) -> str:
    """Return the name of a value in a region; constants have the name of their role."""
    return otherwise if value.name.startswith("constant") else value.name


def _first_dtype(candidates: Sequence[Any]) -> DType | None:
    return next((v.dtype for v in candidates if isinstance(v, Value)), None)


def _evaluate(helper: Callable[..., Any], *arguments: Any) -> Any:
    """Trace a helper into a graph and evaluate it with the references, for calls on arrays."""
    builder = Builder("control")
    with builder:
        result = helper(*arguments)
    leaves: dict[str, Value] = {}

    def collect(part: Any) -> Any:
        if isinstance(part, tuple):
            return tuple(collect(p) for p in part)
        if part is not None:
            leaves[str(len(leaves))] = part
        return part

    collect(result)
    arrays = iter(evaluate(builder.build(leaves), {}).values())

    def restore(part: Any) -> Any:
        if isinstance(part, tuple):
            return tuple(restore(p) for p in part)
        return None if part is None else next(arrays)

    return restore(result)


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
    """The operands, unchanged; optimizations do not merge or move operations across the barrier."""
    return xs


@barrier.vjp
def _(g, y, *xs):
    return g


@barrier.vmap
def _(rows, has_rows, *xs):
    return barrier(*[x if mapped else spread(x, rows) for x, mapped in zip(xs, has_rows, strict=True)])


@composite(samples=[sample((2, 3), gradient=False), sample(ints((3,)), label="int")])
def stop_gradient(x):
    """The operand, unchanged; gradients do not flow through it."""
    return x


stop_gradient.no_vjp("it stops gradients by definition")


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
