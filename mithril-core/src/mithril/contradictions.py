"""Options that contradict each other or the model, and patterns without a match: errors before anything is compiled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from mithril.base.annotations import Layers
from mithril.base.decisions import Decisions
from mithril.base.dims import is_static
from mithril.base.errors import OptionError, closest
from mithril.compiler.partition import TAG
from mithril.ir import Graph, iterate
from mithril.plugins.hookspecs import Option
from mithril.runtime.signature import InputSpec


def check_sizes(settings: Mapping[str, Any], specs: Mapping[str, InputSpec]) -> None:
    """Raise where declared sizes contradict the range of batches, or the fixed shapes of ``static_inference``."""
    batch = settings["hints"].get("input_batch_size_range")
    sizes = {name: spec.shape[0] for name, spec in specs.items() if spec.shape}
    if (
        batch is not None
        and sizes
        and all(isinstance(n, int) and not batch[0] <= n <= batch[1] for n in sizes.values())
    ):
        name, rows = next(iter(sizes.items()))
        raise OptionError(
            f"shapes: '{name}' has {rows} rows, outside of hints' input_batch_size_range={tuple(batch)}",
            hint=f"shapes={{'{name}': [None, ...]}} leaves the batch to the hint",
        )
    for name, spec in specs.items():
        if settings["static_inference"] and spec.shape is not None and not is_static(spec.shape):
            open_sizes = ", ".join(map(str, spec.shape))
            raise OptionError(
                f"static_inference=True fixes all shapes, but '{name}' has an open size: [{open_sizes}]",
                facts=[spec.where] if spec.where else [],
                hint="give numbers in shapes=, or use inference=True, which serves any size",
            )


def check_layers(settings: Mapping[str, Any], options: Iterable[Option], graph: Graph, leaves: Iterable[str]) -> None:
    """Raise where a pattern of layer names, in a dictionary of any option, matches no layer of the model."""
    patterns = [
        (f"{option.name}['{key}']", pattern)
        for option in options
        for key, kind in option.keys.items()
        if kind is Layers and isinstance(value := settings.get(option.name), Mapping)
        for pattern in _listed(value.get(key, ()))
    ]
    if not patterns:
        return
    names = {path for leaf in (*leaves, *(node.origin.path for node, _ in iterate(graph))) for path in _parents(leaf)}
    for where, pattern in patterns:
        _check(where, "layer", pattern, names)


def check_trainable(patterns: Sequence[str] | None, graph: Graph) -> None:
    """Raise where a pattern of ``trainable`` matches no parameter and no input."""
    names = {i.name for i in graph.with_role("param", "input")}
    for pattern in patterns or ():
        _check("trainable", "parameter or input", pattern, names)


def note_places(graph: Graph, settings: Mapping[str, Any], decisions: Decisions) -> None:
    """Record layers that name a backend where ``backend_map`` was not given."""
    if settings["backend_map"]:
        return
    for name, path in {node.tags[TAG]: node.origin.path for node, _ in iterate(graph) if TAG in node.tags}.items():
        decisions.record(
            "ignored", f"set_attribute('backend', '{name}') has no effect without backend_map={{'{name}': ...}}", path
        )


def _listed(given: Any) -> Sequence[str]:
    return (given,) if isinstance(given, str) else tuple(given)


def _parents(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[: k + 1]) for k in range(len(parts))]


def _check(where: str, kind: str, pattern: str, names: Iterable[str]) -> None:
    known = sorted(n for n in names if n)
    if any(fnmatchcase(name, pattern) or name == pattern for name in known):
        return
    near = closest(pattern, known)
    raise OptionError(
        f"'{pattern}' in {where} matches no {kind}",
        facts=[f"the model has: {', '.join([*near, *(n for n in known if n not in near)][:12]) or 'none'}"],
        hint=f"did you mean '{near[0]}'?" if near else None,
    )
