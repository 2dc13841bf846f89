"""Derivatives of graphs as graphs: gradients, products with Jacobians and Hessians, and those matrices themselves.

Everything is made of reverse mode. Gradients are linear in their cotangents, so the gradient of the gradients for the
cotangents is forward mode; matrices are products with all unit vectors at once, by ``vmap``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from mithril.derivatives.gradient_graph import gradients, value_and_gradients
from mithril.derivatives.reverse import live_nodes, zeros
from mithril.derivatives.vmap import vmap_graph
from mithril.graph import REACHED, Builder, GradientError, Graph, Input, Output, Size, TensorType, Value, numel
from mithril.ops import eye, reshape, transpose

Names = Iterable[str] | None


def tangent_name(name: str) -> str:
    """Return the usual name of the tangent of an input or an output."""
    return f"tangent/{name}"


def grad_graph(graph: Graph, of: str | None = None, wrt: Names = None) -> Graph:
    """Return the graph with the gradients of a scalar output; see ``ml.grad``."""
    return value_and_gradients(graph, of, variables(graph, wrt))


def vjp_graph(graph: Graph, of: Names = None, wrt: Names = None) -> Graph:
    """Return the graph with products of cotangents and the Jacobian; see ``ml.vjp``."""
    return gradients(graph, of, variables(graph, wrt))


def jvp_graph(graph: Graph, of: Names = None, wrt: Names = None) -> Graph:
    """Return the graph with products of the Jacobian and tangents; see ``ml.jvp``."""
    names = variables(graph, wrt)
    once = gradients(graph, of, names)
    cotangents, products = _added(graph, once)
    # The products are linear in the cotangents, so that their gradient for these is the product with
    # tangents, whatever the cotangents are; they are replaced by zeros and disappear.
    twice = gradients(once, [r.name for r in products], [i.name for i in cotangents])
    tangents, slopes = _added(once, twice)
    renamed = _tangents(graph, tangents, names)
    results = [
        *graph.carrying(twice.outputs[: len(graph.results)]),
        *(
            Output(r.value, _unused_name(tangent_name(i.of), graph), of=i.of)
            for r, i in zip(slopes, cotangents, strict=True)
        ),
    ]
    return _without(twice, results, cotangents, renamed)


def hvp_graph(graph: Graph, of: str | None = None, wrt: Names = None) -> Graph:
    """Return the graph with products of the Hessian of a scalar output and tangents; see ``ml.hvp``."""
    names = variables(graph, wrt)
    once = value_and_gradients(graph, of, names)
    _, slopes = _added(graph, once)
    twice = gradients(once, [r.name for r in slopes], names)
    tangents, products = _added(once, twice)
    renamed = _tangents(graph, tangents, names)
    results = [
        *once.carrying(twice.outputs[: len(once.results)]),
        *(Output(r.value, _unused_name(f"hvp/{r.of}", graph), of=r.of) for r in products),
    ]
    return _without(twice, results, (), renamed)


def jacobian_graph(graph: Graph, of: Names = None, wrt: Names = None) -> Graph:
    """Return the graph with the Jacobians of outputs for inputs; see ``ml.jacobian``."""
    names = variables(graph, wrt)
    outputs = _float_outputs(graph) if of is None else list(of)
    return _with_jacobians(graph, [(y, x, f"jacobian/{y}/{x}") for y in outputs for x in names])


def hessian_graph(graph: Graph, of: str | None = None, wrt: Names = None) -> Graph:
    """Return the graph with the second derivatives of a scalar output; see ``ml.hessian``."""
    names = variables(graph, wrt)
    once = value_and_gradients(graph, of, names)
    _, slopes = _added(graph, once)
    pairs = [(r.name, x, f"hessian/{r.of}" if r.of == x else f"hessian/{r.of}/{x}") for r in slopes for x in names]
    return _with_jacobians(once, pairs)


def variables(graph: Graph, wrt: Names) -> list[str]:
    """Return the inputs to differentiate by: those named, else the parameters, else all inputs of a float dtype."""
    if wrt is not None:
        return [wrt] if isinstance(wrt, str) else list(wrt)
    for role in ("param", "input"):
        names = [i.name for i in graph.with_role(role) if i.type.dtype.is_float]
        if names:
            return names
    raise GradientError("no input has a float dtype", hint="only floats have derivatives")


def _float_outputs(graph: Graph) -> list[str]:
    return [r.name for r in graph.results if r.role == "output" and r.type.dtype.is_float]


def _added(before: Graph, after: Graph) -> tuple[list[Input], list[Output]]:
    """Return the inputs and the results that a gradient added."""
    values = {i.value for i in before.inputs}
    inputs = [i for i in after.inputs if i.value not in values and i.role == "cotangent"]
    return inputs, list(after.results[len(before.results) :])


def _tangents(graph: Graph, cotangents: Sequence[Input], names: Sequence[str]) -> dict[Value, Input]:
    """Return inputs for tangents in the place of the cotangents of gradients."""
    return {
        i.value: Input(Value(_unused_name(tangent_name(name), graph), i.type))
        for i, name in zip(cotangents, names, strict=True)
    }


def _unused_name(name: str, graph: Graph) -> str:
    """Return the name, with its prefix repeated until the graph has no such name."""
    used = {*graph.by_name, *graph.output_names}
    prefix = name.partition("/")[0]
    while name in used:
        name = f"{prefix}/{name}"
    return name


def _without(graph: Graph, results: Sequence[Output], linear: Sequence[Input], renamed: Mapping[Value, Input]) -> Graph:
    """Return the graph of these results; they are linear in some inputs, on which they cannot depend."""
    values = {r.value for r in results} | {n.result for n in graph.nodes if REACHED in n.tags}
    nodes = live_nodes(graph.nodes, values)
    read = {v for node in nodes for v in node.operands} | values
    builder = Builder(graph.name)
    builder.guards = dict.fromkeys(graph.guards)
    dropped = {i.value for i in linear}
    with builder:
        for i in graph.inputs:
            if i.value in renamed:
                builder.inputs.append(renamed[i.value])
            elif i.value not in dropped and (i.role != "constant" or i.value in read):
                builder.inputs.append(i)
        for i in builder.inputs:
            builder.unique(i.name)
        for node in nodes:
            for v in node.results:
                builder.unique(v.name)
        replacements = {old: i.value for old, i in renamed.items()}
        replacements |= {v: zeros(v.type) for v in dropped & read}
    for node in nodes:
        operands = tuple(v if v is None else replacements.get(v, v) for v in node.operands)
        is_same = all(v is old for v, old in zip(operands, node.operands, strict=True))
        builder.nodes.append(node if is_same else node.replaced(operands=operands))
    return builder.build([replace(r, value=replacements.get(r.value, r.value)) for r in results])


# -- matrices: products with all unit vectors at once ---------------------------------------------------------------
def _with_jacobians(graph: Graph, pairs: Sequence[tuple[str, str, str]]) -> Graph:
    """Return the graph with the Jacobians of (output, input, name of the result)."""
    builder = Builder(graph.name)
    builder.guards = dict.fromkeys(graph.guards)
    with builder:
        arguments = []
        for i in graph.arguments:
            arguments.append(Value(builder.unique(i.name), i.type))
            builder.inputs.append(replace(i, value=arguments[-1]))
        results = list(graph.carrying(builder.inline(graph, arguments)))
        for y, x, name in pairs:
            value = _jacobian(graph, y, x, arguments)
            results.append(Output(value, _unused_name(name, graph), of=x))
    return builder.build(results)


def _jacobian(graph: Graph, y: str, x: str, arguments: Sequence[Value]) -> Value:
    """Return the Jacobian in the current graph: by rows in reverse mode, by columns where they are fewer."""
    types = {r.name: r.type for r in graph.results}
    if y not in types:
        vjp_graph(graph, [y], [x])  # says so
    above, below = types[y].shape, graph.input(x).type.shape
    rows, columns = numel(above), numel(below)
    # Each row is a product in reverse mode, each column one in forward mode, which is reverse mode
    # applied twice.
    is_wide = isinstance(rows, int) and isinstance(columns, int) and columns < rows
    if is_wide:
        by_column = _all_units(jvp_graph, graph, y, x, graph.input(x).type, columns, arguments)
        spread: Value = reshape(by_column, shape=(*below, *above))
        count = len(below)
        return transpose(spread, perm=(*range(count, spread.ndim), *range(count)))
    by_row = _all_units(vjp_graph, graph, y, x, types[y], rows, arguments)
    return reshape(by_row, shape=(*above, *below))


def _all_units(
    transform: Callable[..., Graph],
    graph: Graph,
    y: str,
    x: str,
    seed: TensorType,
    count: Size,
    arguments: Sequence[Value],
) -> Value:
    """Return the products with all unit vectors as rows."""
    single = transform(graph, [y], [x])
    added = single.arguments[-1]
    single = single.replaced(results=single.results[-1:])
    axes = {i.name: 0 if i is added else None for i in single.arguments}
    mapped = vmap_graph(single, axes, 0, count)
    units = reshape(eye(n=count, dtype=seed.dtype), shape=(count, *seed.shape))
    (product_rows,) = Builder.current().inline(mapped, [*arguments, units])
    return product_rows


__all__ = [
    "grad_graph",
    "hessian_graph",
    "hvp_graph",
    "jacobian_graph",
    "jvp_graph",
    "tangent_name",
    "variables",
    "vjp_graph",
]
