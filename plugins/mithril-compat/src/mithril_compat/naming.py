"""Names of the terminals of a compiled model, as the predecessor formed them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from mithril_compat.language.connection import Connection
from mithril_compat.language.model import Model, distinct


def free_inputs(model: Model) -> list[Connection]:
    """Return the inputs without a value: those with names first, then in the order of the layers."""
    layers = [leaf for _, leaf in model.leaves()]
    edges = [model.edges[name].edge for name in model.edges]
    edges += [leaf.edges[key].edge for leaf in layers for key in leaf.input_names]
    states = {id(source.edge) for source, _, _ in all_states(model)}
    return [e for e in distinct(edges) if e.producer is None and (not e.is_valued or id(e) in states)]


def all_states(model: Model) -> list[tuple[Connection, Connection, object]]:
    """Return the states of the model and of the models within it."""
    inner = (state for block in model.blocks if isinstance(block, Model) for state in all_states(block))
    return [*model.states, *inner]


def short_names(model: Model) -> dict[int, str]:
    """Return names by edge: the model's, else those of the layer's terminals, numbered if several are equal."""
    names = {id(edge.edge): name for name, edge in model.edges.items()}
    used = set(names.values())
    unnamed = [e for e in free_inputs(model) if id(e) not in names]
    counts = Counter(e.origin_name or "input" for e in unnamed)
    counts.update(used)
    numbers: Counter[str] = Counter()
    for edge in unnamed:
        stem = edge.origin_name or "input"
        name = stem
        while name in used or (counts[stem] > 1 and name == stem):
            name = f"{stem}_{numbers[stem]}"
            numbers[stem] += 1
        names[id(edge)] = name
        used.add(name)
    return names


def long_names(model: Model) -> dict[int, str]:
    """Return names by edge with those of the models around the layer: ``block_0_linear_weight``."""
    names = {id(edge.edge): name for name, edge in model.edges.items()}
    used = set(names.values())
    for path, leaf in model.leaves():
        for key in leaf.input_names:
            edge = leaf.edges[key].edge
            if edge.producer is None and id(edge) not in names:
                stem = "_".join((*path, key))
                name, number = stem, 0
                while name in used:
                    name, number = f"{stem}_{number}", number + 1
                names[id(edge)] = name
                used.add(name)
    return names


def output_names(model: Model, used: Iterable[str]) -> dict[str, Connection]:
    """Return the outputs by name: the exposed ones, else the usual outputs under the names of their layers."""
    if model.exposed:
        return {name: model.edges[name].edge for name in model.exposed}
    outputs: dict[str, Connection] = {}
    for cout in model.couts:
        name = next((n for n, e in model.edges.items() if e.edge is cout.edge), cout.edge.origin_name or "output")
        while name in outputs or name in used:
            name = f"_{name}"
        outputs[name] = cout.edge
    return outputs
