"""If, Loop and Scan."""

from __future__ import annotations

import numpy as np

from mithril import ops
from mithril.graph import Builder, OperationError, ShapeError, Value
from mithril_onnx.importer import Initializer
from mithril_onnx.operators.common import int64, require
from mithril_onnx.table import Item, operator
from mithril_onnx.values import NotConstantError, as_value

UNROLLED = 64  # loops of at most this number of iterations are unrolled


@operator(folds=False)
def If(condition: Item, *, then_branch, else_branch, context):
    try:
        is_true = bool(context.known(condition, "the condition").reshape(-1)[0])
    except NotConstantError as unknown:
        try:
            return _branches(condition, then_branch, else_branch, unknown)
        except ShapeError as error:
            sizes = context.open_equality
            # Only one branch of an outer If would require it.
            if sizes is None or hasattr(Builder.current(), "outer"):
                raise error.with_hint(unknown.hint or "fix the sizes: ml.compile(model, shapes={...})") from None
            require(sizes[0], "==", sizes[1], "the other branch of an If has a result of another shape")
            is_true = True
    return tuple((then_branch if is_true else else_branch)())


def _branches(condition, then_branch, else_branch, unknown):
    condition = ops.reshape(as_value(condition), shape=())

    def branch(body):
        return lambda: tuple(as_value(r) for r in _tensors(body(), unknown))

    return tuple(ops.cond(condition, branch(then_branch), branch(else_branch)))


def _tensors(results, unknown):
    """Return the results of a branch; a sequence or nothing requires that the condition is known."""
    if any(isinstance(r, list) or r is None for r in results):
        raise unknown
    return results


@operator(folds=False)
def Loop(trips: Item = None, condition: Item = None, *initial: Item, body, context):
    count, always = _known_trips(trips, condition, context)
    # Sequences are lists of Python, which a loop of the graph cannot hold.
    if isinstance(count, int) and (count <= UNROLLED or any(isinstance(v, list) for v in initial)):
        done = _unrolled(count, always, list(initial), body, context)
        if done is not None:
            return done
    scans = body.results - 1 - len(initial)
    if scans or any(isinstance(v, list) or v is None for v in initial):
        for operand in (trips if count is None else None, condition):
            if operand is not None:
                context.known(operand, "the trips of a loop with sequences or results per trip")
    states = [as_value(v) for v in initial]
    if scans:
        return _scanned(count, condition, states, body, context)
    return _while(trips, condition, states, body)


def _known_trips(trips, condition, context):
    """Return the bound of the trips (None if unknown), and whether the initial condition is known to be True."""
    try:
        count = None if trips is None else context.importer.sizes(trips)[0]
    except NotConstantError:
        count = None
    try:
        is_true = condition is None or bool(context.known(condition, "the condition").reshape(-1)[0])
    except NotConstantError:
        return count, None
    return (count, True) if is_true else (0, True)


def _unrolled(count, always, states, body, context):
    """Return the results of a loop whose conditions are all known, or None."""
    if always is None:
        return None
    rows = []
    going = True
    trip = 0
    while going and trip < count:
        going_now, *results = body(np.asarray(trip, np.int64), np.asarray(True), *states)
        try:
            going = bool(context.known(going_now, "the condition").reshape(-1)[0])
        except NotConstantError:
            return None
        states = results[: len(states)]
        rows.append(results[len(states) :])
        trip += 1
    stacked = []
    for k in range(body.results - 1 - len(states)):
        elements = [row[k] for row in rows]
        if not elements:
            shape = _empty_shape(body, 1 + len(states) + k)
            stacked.append(np.zeros(*shape))
        elif all(isinstance(e, np.ndarray) and e.dtype != object for e in elements):
            stacked.append(np.stack(elements))
        else:
            stacked.append(ops.stack(*[as_value(e) for e in elements], axis=0))
    return (*states, *stacked)


def _empty_shape(body, k):
    from mithril_onnx.tensors import dtype_of_code

    declared = body.graph.output[k].type.tensor_type
    sizes = [d.dim_value if d.HasField("dim_value") else 0 for d in declared.shape.dim]
    return (0, *sizes), dtype_of_code(declared.elem_type).numpy


def _while(trips, condition, states, body):
    limit = None if trips is None else ops.reshape(int64(as_value(trips)), shape=())
    start = True if condition is None else ops.reshape(as_value(condition), shape=())
    kinds = [s.dtype for s in states]

    def holds(state):
        trip, going, *_ = state
        return going if limit is None else ops.logical_and(going, ops.less(trip, limit))

    def step(state):
        trip, going, *values = state
        after, *results = body(trip, going, *values)
        results = [_as(r, kind) for r, kind in zip(results, kinds, strict=True)]
        return (trip + np.int64(1), ops.reshape(as_value(after), shape=()), *results)

    first = (np.asarray(0, np.int64), np.asarray(True) if start is True else start, *states)
    return tuple(ops.while_loop(holds, step, first)[2:])


def _as(result, kind):
    value = as_value(result)
    return value if value.dtype is kind else ops.cast(value, dtype=kind)


def _scanned(count, condition, states, body, context):
    """Run a loop with results per trip as a scan over the trips; all trips must happen."""
    kinds = [s.dtype for s in states]

    def step(carry, trip):
        after, *results = body(ops.cast(trip, dtype="int64"), np.asarray(True), *carry)
        try:
            if not bool(context.known(after, "the condition").reshape(-1)[0]):
                raise OperationError("a Loop with results per trip stops early")
        except NotConstantError:
            raise NotConstantError("the condition of a Loop with results per trip", []) from None
        values = [_as(r, kind) for r, kind in zip(results, kinds, strict=False)]
        return tuple(values), tuple(as_value(r) for r in results[len(values) :])

    last, stacked = ops.scan(step, tuple(states), ops.iota(shape=(count,)))
    return (*last, *stacked)


@operator(folds=False, since=9)
def Scan(
    *operands: Item, body, num_scan_inputs, scan_input_axes=None, scan_input_directions=None,
    scan_output_axes=None, scan_output_directions=None,
):  # fmt: skip
    split = len(operands) - num_scan_inputs
    values = [as_value(v) for v in operands]
    return _scan(
        values[:split], values[split:], body, scan_input_axes, scan_input_directions, scan_output_axes,
        scan_output_directions,
    )  # fmt: skip


def _scan(states, sequences, body, input_axes, input_directions, output_axes, output_directions):
    for k, axis in enumerate(input_axes or ()):
        axis %= sequences[k].ndim
        if axis:
            rank = sequences[k].ndim
            sequences[k] = ops.transpose(sequences[k], perm=(axis, *(a for a in range(rank) if a != axis)))
    for k, backward in enumerate(input_directions or ()):
        if backward:
            sequences[k] = ops.flip(sequences[k], axis=(0,))
    kinds = [s.dtype for s in states]

    def step(carry, elements):
        results = body(*carry, *elements)
        values = [_as(r, kind) for r, kind in zip(results, kinds, strict=False)]
        return tuple(values), tuple(as_value(r) for r in results[len(values) :])

    last, stacked = ops.scan(step, tuple(states), tuple(sequences))
    outputs = list(stacked)
    for k, backward in enumerate(output_directions or ()):
        if backward:
            outputs[k] = ops.flip(outputs[k], axis=(0,))
    for k, axis in enumerate(output_axes or ()):
        axis %= outputs[k].ndim
        if axis:
            order = list(range(1, outputs[k].ndim))
            order.insert(axis, 0)
            outputs[k] = ops.transpose(outputs[k], perm=tuple(order))
    return (*last, *outputs)


@operator(name="Scan", folds=False, since=8)
def _Scan8(lengths: Item = None, *operands: Item, body, num_scan_inputs, directions=None):
    """Version 8 has a batch axis in front; each row is scanned on its own."""
    values = [as_value(v) for v in operands]
    split = len(values) - num_scan_inputs
    rows = values[0].shape[0]
    if type(rows) is not int:
        raise OperationError("Scan of opset 8 requires a static batch size")
    parts = []
    for row in range(rows):
        row_values = [ops.select(v, index=(row,), axes=(0,)) for v in values]
        parts.append(_scan(row_values[:split], row_values[split:], body, None, directions, None, None))
    return tuple(ops.stack(*column, axis=0) for column in zip(*parts, strict=True))


_ = (Initializer, Value)
