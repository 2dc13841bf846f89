"""IF, WHILE and CALL, and variables of the file, which are states of the model."""

from __future__ import annotations

from mithril import ops
from mithril.graph import UnsupportedError
from mithril_tflite.table import Stored, operator
from mithril_tflite.values import Handle
from mithril_tflite.variables import variable_name


def _captured(xs, context, first=0):
    """Return operands as bodies capture them: those that are known stay known."""
    arrays = (context.constant(k) for k in range(first, first + len(xs)))
    return [x if array is None else array for x, array in zip(xs, arrays, strict=True)]


@operator(folds=False)
def IF(condition: Stored, *xs: Stored, then_subgraph_index, else_subgraph_index, context):
    captured = _captured(xs, context, 1)
    bodies = [context.body(k) for k in (then_subgraph_index, else_subgraph_index)]
    decided = context.constant(0)
    if decided is not None:
        return bodies[0 if decided.all() else 1](*captured)
    then, otherwise = ((lambda body=body: body(*captured)) for body in bodies)
    return ops.as_tuple(ops.cond(ops.reshape(condition, shape=()), then, otherwise))


@operator(folds=False)
def WHILE(*xs: Stored, cond_subgraph_index, body_subgraph_index, context):
    condition, body = context.body(cond_subgraph_index), context.body(body_subgraph_index)
    graph = body.graph
    # Operands that the body returns unchanged, such as weights, are not states of the loop.
    changing = [k for k, (a, b) in enumerate(zip(graph.inputs, graph.outputs, strict=True)) if a != b]
    everything = _captured(xs, context)

    def arguments(state):
        values = dict(zip(changing, state, strict=True))
        return [values.get(k, x) for k, x in enumerate(everything)]

    def holds(state):
        return ops.reshape(condition(*arguments(state))[0], shape=())

    def step(state):
        results = body(*arguments(state))
        return tuple(results[k] for k in changing)

    last = ops.while_loop(holds, step, tuple(xs[k] for k in changing))
    values = dict(zip(changing, last, strict=True))
    return tuple(values.get(k, x) for k, x in enumerate(xs))


@operator(folds=False)
def CALL(*xs: Stored, subgraph, context):
    return context.body(subgraph)(*_captured(xs, context))


@operator(folds=False)
def CALL_ONCE(*, init_subgraph_index):
    return ()  # initial values of states are read when the file is


@operator(folds=False)
def VAR_HANDLE(*, shared_name):
    return Handle(variable_name(shared_name))


@operator(folds=False)
def READ_VARIABLE(handle: Stored, *, context):
    return context.weights.variable(_name(handle))


@operator(folds=False)
def ASSIGN_VARIABLE(handle: Stored, value: Stored, *, context):
    context.weights.assign(_name(handle), value)
    return ()


def _name(handle):
    if not isinstance(handle, Handle):
        raise UnsupportedError("a variable is an input of the model", facts=["accepted: variables of VAR_HANDLE"])
    return str(handle)
