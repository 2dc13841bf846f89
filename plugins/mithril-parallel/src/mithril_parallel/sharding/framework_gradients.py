"""Gradients that a framework computes: an operation around a forward graph, in place of its backward pass.

Engines for many devices, such as those of PyTorch, differentiate forward passes themselves. A training step for them
contains this operation instead of the operations of a backward pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mithril.derivatives import gradients
from mithril.graph import Builder, Graph, Ints, Output, TensorType, cotangent_name, evaluate, op, result

GRADIENTS = "mesh.gradients"


def _types(
    types: Sequence[TensorType | None], attributes: Mapping[str, Any], regions: Sequence[Graph]
) -> tuple[TensorType, ...]:
    (forward,) = regions
    arguments = forward.arguments
    return (*(v.type for v in forward.outputs), *(arguments[k].type for k in attributes["wrt"]))


@op(name=GRADIENTS, infer=_types, results=(), opaque=True, no_axes="its region decides")
def framework_gradients(*operands: Any, objectives: Ints, wrt: Ints, regions: Any) -> Any:
    """The results of the forward graph in the region, then gradients of ``objectives`` for its arguments ``wrt``.

    Both are numbers; objectives are results. The operands are the arguments of the graph, then the cotangents of the
    objectives.
    """
    (forward,) = regions
    names = [i.name for i in forward.arguments]
    graph = gradients(forward, [forward.output_names[k] for k in objectives], [names[k] for k in wrt])
    values = dict(zip((i.name for i in graph.arguments), operands, strict=True))
    return tuple(evaluate(graph, values).values())


framework_gradients.no_vjp("it computes gradients")


def with_framework_gradients(
    forward: Graph, objectives: Sequence[str], wrt: Iterable[str], *, cotangents: bool = False
) -> Graph:
    """Return a graph with the results of ``forward`` and gradients of ``objectives`` for ``wrt``, by one operation.

    With ``cotangents`` those of the objectives are additional inputs, otherwise 1.
    """
    builder, names, wrt = Builder(forward.name), [i.name for i in forward.arguments], tuple(wrt)
    with builder:
        operands = [
            builder.input(i.name, i.type.shape, i.type.dtype, i.role, tags=i.tags, of=i.of) for i in forward.arguments
        ]
        outputs = dict(zip(forward.output_names, forward.outputs, strict=True))
        for name in objectives:
            t = outputs[name].type
            if cotangents:
                operands.append(builder.input(cotangent_name(name), t.shape, t.dtype, "cotangent", of=name))
            else:
                operands.append(builder.constant(1.0, t.dtype))
        numbers = {
            "objectives": tuple(forward.output_names.index(n) for n in objectives),
            "wrt": tuple(names.index(n) for n in wrt),
        }
        values = builder.emit(framework_gradients, operands, numbers, [forward])
    count = len(forward.results)
    results = [Output(v, r.name, r.role, r.of) for v, r in zip(values, forward.results, strict=False)]
    results += [result("gradient", n, v) for n, v in zip(wrt, values[count:], strict=True)]
    return builder.build(results)
