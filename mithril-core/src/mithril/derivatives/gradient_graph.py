"""Graphs with gradients of chosen outputs for chosen inputs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mithril.derivatives.reverse import Lowers, differentiate
from mithril.graph import (
    GradientError,
    Graph,
    Input,
    Node,
    Output,
    Value,
    cotangent_name,
    operation,
    result_name,
    unknown,
)

REDUCE = "reduce it with sum(x) or mean(x), or give a cotangent: gradients(graph, of=[...])"


def gradients(
    graph: Graph, of: Iterable[str] | None = None, wrt: Iterable[str] | None = None, lowers: Lowers | None = None
) -> Graph:
    """Add gradients of the outputs ``of`` (default: all of a float dtype) for the inputs ``wrt``.

    The default of ``wrt`` is all parameters of a float dtype. ``lowers`` is that of the backend, for which gradients
    with a kernel stay one operation.
    """
    return _with_gradients(graph, _outputs(graph, of), _inputs(graph, wrt), lowers)


def value_and_gradients(
    graph: Graph, loss: str | None = None, wrt: Iterable[str] | None = None, lowers: Lowers | None = None
) -> Graph:
    """Add gradients of one scalar output whose cotangent is the constant 1."""
    scalars = [n for n, v in zip(graph.output_names, graph.outputs, strict=True) if v.dtype.is_float and v.shape == ()]
    if loss is None:
        if len(scalars) != 1:
            if not scalars:
                raise GradientError(
                    "no output is a scalar whose gradients can be taken",
                    facts=[f"'{n}' is {v.type}" for n, v in zip(graph.output_names, graph.outputs, strict=True)],
                    hint=REDUCE,
                )
            raise GradientError(
                "which output is the loss?", facts=[f"scalar outputs: {', '.join(scalars)}"], hint="name it"
            )
        loss = scalars[0]
    selected = _outputs(graph, [loss])
    if selected[loss].shape != ():
        raise GradientError(
            f"the loss '{loss}' is {selected[loss].type}, not a scalar",
            hint=REDUCE,
        )
    result = _with_gradients(graph, selected, _inputs(graph, wrt), lowers)
    cotangent = result.arguments[-1]
    one = operation("constant")
    node = Node(one, (), one.complete({"value": 1.0, "dtype": cotangent.type.dtype}), (cotangent.value,))
    return result.replaced(inputs=tuple(i for i in result.inputs if i is not cotangent), nodes=(node, *result.nodes))


def _with_gradients(graph: Graph, selected: dict[str, Value], targets: Sequence[Input], lowers: Lowers | None) -> Graph:
    used_names = {i.name for i in graph.inputs}
    names = [_unused_name(cotangent_name(name), used_names) for name in selected]
    outputs = list(zip(names, selected.values(), strict=True))
    derivative = differentiate(graph, outputs, [i.value for i in targets], lowers)
    output_names = dict(zip(derivative.cotangents, selected, strict=True))
    used_names = set(graph.output_names)
    gradient_results = [
        Output(v, _unused_name(result_name("gradient", i.name), used_names), "gradient", i.name)
        for i, v in zip(targets, derivative.gradients, strict=True)
    ]
    return Graph(
        tuple(
            Input(i.value, "cotangent", of=output_names[i.value]) if i.value in output_names else i
            for i in derivative.inputs
        ),
        (*derivative.forward, *derivative.backward),
        (*graph.carrying(derivative.outputs), *gradient_results),
        graph.name,
        derivative.guards,
    )


def _unused_name(name: str, used_names: set[str]) -> str:
    while name in used_names:
        name = result_name("gradient", name)
    used_names.add(name)
    return name


def _outputs(graph: Graph, of: Iterable[str] | None) -> dict[str, Value]:
    available = dict(zip(graph.output_names, graph.outputs, strict=True))
    if of is None:
        return {n: v for n, v in available.items() if v.dtype.is_float}
    selected = {}
    for name in of:
        if name not in available:
            message, facts, hint = unknown("output", name, list(available))
            raise GradientError(message, facts=facts, hint=hint)
        if not available[name].dtype.is_float:
            raise GradientError(f"output '{name}' is {available[name].dtype}: only floats have gradients")
        selected[name] = available[name]
    return selected


def _inputs(graph: Graph, wrt: Iterable[str] | None) -> list[Input]:
    if wrt is None:
        return [i for i in graph.with_role("param") if i.type.dtype.is_float]
    by_name = {i.name: i for i in graph.arguments}
    selected = []
    for name in dict.fromkeys(wrt):
        if name not in by_name:
            message, facts, hint = unknown("input to differentiate by", name, list(by_name))
            raise GradientError(message, facts=facts, hint=hint)
        if not by_name[name].type.dtype.is_float:
            raise GradientError(f"input '{name}' is {by_name[name].type.dtype}: only floats have gradients")
        selected.append(by_name[name])
    return selected
