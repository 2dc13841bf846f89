"""Functions for autograd around operations that it cannot differentiate, with their gradients in the graph.

They are operations with a custom gradient, those that run on the host as NumPy references, and kernels of plugins.
Each becomes a ``torch.autograd.Function`` of two generated functions: the operation, and its gradient in the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from mithril.backend import Call, needs
from mithril.derivatives import live_nodes, operation_gradient
from mithril.graph import Graph, Input, Ints, Node, Output, TensorType, Value, decompose, op
from mithril_torch.lowering import table

NAME = "autograd.with_gradient"  # names in "torch." are not registered; one that is would make the others unknown
IMPORT = "from mithril_torch.parallel.own_gradients import called"


def _types(types: Sequence[TensorType | None], attributes: Any, regions: Sequence[Graph]) -> tuple[TensorType, ...]:
    return tuple(v.type for v in regions[0].outputs)


@op(name=NAME, infer=_types, results=(), opaque=True, no_axes="its regions decide")
def with_gradient(*operands: Any, wrt: Ints, complete: bool, regions: Any) -> Any:
    """The results of the first region; the gradients for the operands ``wrt`` are those of the second region.

    With ``complete`` the regions compute with complete tensors, not with parts of a ``DTensor``.
    """
    raise NotImplementedError("only generated code of PyTorch contains this operation")


with_gradient.no_vjp("it contains its gradient")


def with_own_gradients(
    graph: Graph, is_own: Callable[[Node], bool], on_host: Callable[[Node], bool], lowers: Callable[[Node], bool]
) -> Graph:
    """Return the graph with functions in place of the selected operations, made of operations that are lowered."""
    nodes = []
    for node in graph.nodes:
        if node.regions:
            regions = tuple(with_own_gradients(g, is_own, on_host, lowers) for g in node.regions)
            node = node.replaced(regions=regions)
        elif is_own(node):
            node = _with_gradient(graph, node, lowers, complete=on_host(node))
        nodes.append(node)
    return graph.replaced(nodes=tuple(nodes))


def _with_gradient(graph: Graph, node: Node, lowers: Callable[[Node], bool], *, complete: bool) -> Node:
    operands = {k: v for k, v in enumerate(node.operands) if v is not None}
    constants = {k: p for k, v in operands.items() if (p := graph.producers.get(v)) is not None and p.is_constant}
    passed = {k: v for k, v in operands.items() if k not in constants}
    has_gradient = node.op.gradient is not None or not node.op.gradient_reason
    has_gradient = has_gradient and any(v.dtype.is_float for v in node.results)
    trained = [k for k, v in passed.items() if v.dtype.is_float and has_gradient]
    inner = {k: Value(f"operand_{k}", v.type) for k, v in operands.items()}
    results = tuple(Value(f"result_{k}", v.type) for k, v in enumerate(node.results))
    call = node.replaced(operands=tuple(inner.get(k) for k in range(len(node.operands))), results=results)
    forward = Graph(tuple(map(Input, inner.values())), (call,), tuple(Output(v, v.name) for v in results))
    functions = [_with_constants(forward, constants)]
    if trained:
        gradient = operation_gradient(node)
        floats = [k for k, v in operands.items() if v.dtype.is_float]
        selected = [r for k, r in zip(floats, gradient.results, strict=True) if k in trained]
        nodes = live_nodes(gradient.nodes, [r.value for r in selected])
        functions.append(_with_constants(gradient.replaced(nodes=tuple(nodes), results=tuple(selected)), constants))
    wrt = tuple(list(passed).index(k) for k in trained)
    return node.replaced(
        op=with_gradient,
        operands=tuple(passed.values()),
        attributes={"wrt": wrt, "complete": complete},
        regions=tuple(decompose(g, lowers, "torch") for g in functions),
    )


def _with_constants(graph: Graph, constants: Mapping[int, Node]) -> Graph:
    """Return the graph of an operation with some of its operands as constants."""
    values = {f"operand_{k}": producer for k, producer in constants.items()}
    nodes = [values[i.name].replaced(results=(i.value,)) for i in graph.inputs if i.name in values]
    inputs = tuple(i for i in graph.inputs if i.name not in values)
    return graph.replaced(inputs=inputs, nodes=(*nodes, *graph.nodes))


# -- generated code ------------------------------------------------------------------------------------------------
@needs(imports=(IMPORT,))
def call_with_gradient(forward, backward, wrt, complete, *operands):  # type: ignore[no-untyped-def]
    """Return the results of ``forward``, whose gradients for the operands ``wrt`` are those of ``backward``."""
    return called(forward, backward, wrt, complete, operands)


@table.function(NAME)
def _lower(call: Call) -> None:
    forward = call.region(0)
    backward = call.region(1) if call.wrt else "None"
    arguments = [forward, backward, call.literal(call.wrt), call.literal(call.complete), *map(str, call.operands)]
    call.line(f"({', '.join(call.results)},) = {call.helper(call_with_gradient)}({', '.join(arguments)})")


def called(
    forward: Callable[..., Any], backward: Callable[..., Any] | None, wrt: Sequence[int], complete: bool, operands: Any
) -> tuple[Any, ...]:
    """Call a function whose gradient is another one; ``complete`` gathers operands that are a ``DTensor``."""
    mesh = next((x.device_mesh for x in operands if hasattr(x, "device_mesh")), None) if complete else None
    if mesh is not None:
        operands = [x.full_tensor() if hasattr(x, "full_tensor") else x for x in operands]
    if complete:
        forward, backward = _on_copies(forward), backward and _on_copies(backward)
    results = forward(*operands) if backward is None else _Called.apply(forward, backward, tuple(wrt), *operands)
    return tuple(results) if mesh is None else tuple(_replicated(x, mesh) for x in results)


def _on_copies(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs on copies: memory that NumPy has seen cannot be freed by ``fully_shard``.

    Its results are contiguous, as views of a ``DTensor`` in autograd require.
    """
    return lambda *operands: tuple(y.contiguous() for y in function(*(x.clone() for x in operands)))


def _replicated(x: torch.Tensor, mesh: Any) -> Any:
    from torch.distributed.tensor import DTensor, Replicate

    if not x.is_floating_point():  # inputs of integers are plain tensors as well
        return x
    return DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)


class _Called(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx, forward, backward, wrt, *operands):  # type: ignore[no-untyped-def]
        results = forward(*operands)
        ctx.backward_function, ctx.wrt, ctx.count = backward, wrt, len(operands)
        ctx.mark_non_differentiable(*(x for x in results if not x.is_floating_point()))
        ctx.save_for_backward(*operands, *results)
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx, *cotangents):  # type: ignore[no-untyped-def]
        results = ctx.saved_tensors[ctx.count :]
        floats = [g for x, g in zip(results, cotangents, strict=True) if x.is_floating_point()]
        gradients = [None] * ctx.count
        for k, gradient in zip(ctx.wrt, ctx.backward_function(*ctx.saved_tensors, *floats), strict=True):
            gradients[k] = gradient
        return None, None, None, *gradients
