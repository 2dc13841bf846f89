"""Graphs with gradients of chosen outputs for chosen inputs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mithril.autodiff.reverse import differentiate
from mithril.base import GradientError, operation, unknown
from mithril.ir import Graph, Input, Node, Output, Value, cotangent_name, result_name


def gradients(graph: Graph, of: Iterable[str] | None = None, wrt: Iterable[str] | None = None) -> Graph:
    """The graph with gradients of the outputs ``of`` (default: all of a float dtype) for the inputs ``wrt``
    (default: all parameters of a float dtype)."""
    return _with_gradients(graph, _outputs(graph, of), _inputs(graph, wrt))


def value_and_gradients(graph: Graph, loss: str | None = None, wrt: Iterable[str] | None = None) -> Graph:
    """As ``gradients`` of one scalar output whose cotangent is 1, so that there is no further input."""
    scalars = [n for n, v in zip(graph.output_names, graph.outputs, strict=True) if v.dtype.is_float and v.shape == ()]
    if loss is None:
        if len(scalars) != 1:
            raise GradientError(
                "which output is the loss?", facts=[f"scalar outputs: {', '.join(scalars) or 'none'}"], hint="name it"
            )
        loss = scalars[0]
    chosen = _outputs(graph, [loss])
    if chosen[loss].shape != ():
        raise GradientError(
            f"the loss '{loss}' is {chosen[loss].type}, not a scalar",
            hint="reduce it with sum(x) or mean(x), or give a cotangent: gradients(graph, of=[...])",
        )
    made = _with_gradients(graph, chosen, _inputs(graph, wrt))
    cotangent = made.arguments[-1]
    one = operation("constant")
    node = Node(one, (), one.complete({"value": 1.0, "dtype": cotangent.type.dtype}), (cotangent.value,))
    return made.replaced(inputs=tuple(i for i in made.inputs if i is not cotangent), nodes=(node, *made.nodes))


def _with_gradients(graph: Graph, chosen: dict[str, Value], targets: Sequence[Input]) -> Graph:
    taken = {i.name for i in graph.inputs}
    names = [_free(cotangent_name(name), taken) for name in chosen]
    made = differentiate(graph, list(zip(names, chosen.values(), strict=True)), [i.value for i in targets])
    of = dict(zip(made.given, chosen, strict=True))
    taken = set(graph.output_names)
    found = [
        Output(v, _free(result_name("gradient", i.name), taken), "gradient", i.name)
        for i, v in zip(targets, made.found, strict=True)
    ]
    return Graph(
        tuple(Input(i.value, "cotangent", of=of[i.value]) if i.value in of else i for i in made.inputs),
        (*made.forward, *made.backward),
        (*graph.carrying(made.outputs), *found),
        graph.name,
        made.guards,
    )


def _free(name: str, taken: set[str]) -> str:
    while name in taken:
        name = result_name("gradient", name)
    taken.add(name)
    return name


def _outputs(graph: Graph, of: Iterable[str] | None) -> dict[str, Value]:
    known = dict(zip(graph.output_names, graph.outputs, strict=True))
    if of is None:
        return {n: v for n, v in known.items() if v.dtype.is_float}
    chosen = {}
    for name in of:
        if name not in known:
            what, facts, hint = unknown("output", name, list(known))
            raise GradientError(what, facts=facts, hint=hint)
        if not known[name].dtype.is_float:
            raise GradientError(f"output '{name}' is {known[name].dtype}: only floats have gradients")
        chosen[name] = known[name]
    return chosen


def _inputs(graph: Graph, wrt: Iterable[str] | None) -> list[Input]:
    if wrt is None:
        return [i for i in graph.with_role("param") if i.type.dtype.is_float]
    by_name = {i.name: i for i in graph.arguments}
    chosen = []
    for name in dict.fromkeys(wrt):
        if name not in by_name:
            what, facts, hint = unknown("input to differentiate by", name, list(by_name))
            raise GradientError(what, facts=facts, hint=hint)
        if not by_name[name].type.dtype.is_float:
            raise GradientError(f"input '{name}' is {by_name[name].type.dtype}: only floats have gradients")
        chosen.append(by_name[name])
    return chosen
