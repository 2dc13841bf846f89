"""Sums of gradients over several batches, which processes exchange once: in the last batch of a step.

A program that adds the gradient of a parameter to an argument is changed: the backward pass adds it in the memory of
this argument. The argument then has the sum of each process until a program reads it otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace

from mithril import ops
from mithril.graph import Graph, Node
from mithril_torch.parallel.program_parts import ForwardPart, Part


def accumulate_locally(
    parts: Sequence[Part], results: Mapping[str, str], averaged: Callable[[ForwardPart], Container[str]]
) -> tuple[list[Part], dict[str, str]]:
    """Return the parts and results of a program whose backward passes add to sums.

    ``averaged`` returns the trained parameters of a forward pass for which this is possible.
    """
    changed, values = list(parts), dict(results)
    for k, part in enumerate(parts):
        if not isinstance(part, ForwardPart):
            continue
        gradients = dict(zip(part.trained, part.gives[len(part.gives) - len(part.trained) :], strict=True))
        places = {n: place for n, g in gradients.items() if (place := _sum_of(changed, values, g)) is not None}
        possible = averaged(part) if places else ()
        sums = {}
        for name, (j, holder, total) in places.items():
            if name in possible:
                changed[j] = _without(changed[j], gradients[name], holder)
                values = {n: gradients[name] if v == total else v for n, v in values.items()}
                sums[name] = holder
        changed[k] = replace(part, sums=sums)
    return changed, values


def _sum_of(parts: Sequence[Part], results: Mapping[str, str], gradient: str) -> tuple[int, str, str | None] | None:
    """Return where a gradient is added to an argument, if nothing else reads either.

    That is the number of the part, the name of the argument, and that of the sum if the part returns it.
    """
    readers = [k for k, part in enumerate(parts) if gradient in part.takes]
    if len(readers) != 1 or gradient in results.values() or isinstance(parts[readers[0]], ForwardPart):
        return None
    part = parts[readers[0]]
    node = _sum(part, gradient)
    if node is None:
        return None
    holder = next(n for n, i in zip(part.takes, part.graph.inputs, strict=True) if i.value is node.operands[0])
    if sum(holder in other.takes for other in parts) > 1:
        return None
    return readers[0], holder, dict(zip(part.graph.outputs, part.gives, strict=True)).get(node.result)


def _sum(part: Part, gradient: str) -> Node | None:
    """Return the only reader of a gradient if it adds it to an argument that nothing else reads."""
    inputs = dict(zip(part.takes, part.graph.inputs, strict=True))
    value = inputs[gradient].value
    readers = part.graph.users.get(value, ())
    if len(readers) != 1 or readers[0].op is not ops.add or readers[0].operands[1] is not value:
        return None
    argument = part.graph.input_of.get(readers[0].operands[0])  # type: ignore[arg-type]
    if argument is None or argument.role != "param" or argument.type != inputs[gradient].type:
        return None
    is_read_once = len(part.graph.users.get(argument.value, ())) == 1 and argument.value not in part.graph.outputs
    return readers[0] if is_read_once else None


def _without(part: Part, gradient: str, holder: str) -> Part:
    """Return a part that reads the sum instead of the gradient, under whose name programs return it."""
    inputs = dict(zip(part.takes, part.graph.inputs, strict=True))
    value = inputs[gradient].value
    (node,) = part.graph.users[value]
    nodes = tuple(
        n.replaced(operands=tuple(value if v is node.result else v for v in n.operands))
        for n in part.graph.nodes
        if n is not node
    )
    del inputs[holder]
    results = tuple(r for r in part.graph.results if r.value is not node.result)
    graph = Graph(tuple(inputs.values()), nodes, results, part.graph.name)
    return Part(graph, tuple(inputs), graph.output_names)
