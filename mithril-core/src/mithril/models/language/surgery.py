"""Model surgery: walk over the layers of a model by path, find them, and replace them in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple

from mithril.backend import matches
from mithril.graph import ModelError, closest
from mithril.models.language.children import Keys, parts, slot, with_part
from mithril.models.language.layer import Layer
from mithril.models.language.model import Model
from mithril.models.language.source_location import user_location
from mithril.models.language.trace_context import join_path

Target = str | Layer | type
Replacement = Layer | Callable[[Layer], Layer]


class Place(NamedTuple):
    """Where a layer stores a child: its name in paths, the attribute, the child, and a function that replaces it."""

    name: str
    attribute: str
    child: Layer
    replace_child: Callable[[Layer], None]


def places(layer: Layer) -> Iterator[Place]:
    """Yield the places of all children: steps of a model, then attributes and lists of layers."""
    steps = layer.steps if isinstance(layer, Model) else []
    for step in steps:
        assert isinstance(step.layer, Layer)
        yield Place(step.name, step.name, step.layer, partial(_put_step, step))
    wired = {id(step.layer) for step in steps}
    for attribute, keys, child in parts(layer, Layer):
        if id(child) not in wired:
            replace_part = partial(_put_part, layer, attribute, keys, child)
            yield Place(layer.child_name(child), slot(attribute, keys), child, replace_part)


def _put_step(step: Any, new: Layer) -> None:
    bound = {*step.bindings, *step.results}
    missing = sorted(bound - set(new.terminals()))
    if missing:
        raise ModelError(
            f"{new!r} cannot replace '{step.label}', {step.layer!r}: it has no terminal '{missing[0]}'",
            facts=[f"the model connects: {', '.join(sorted(bound))}", f"terminals: {', '.join(new.terminals())}"],
        )
    step.layer = new


def _put_part(parent: Layer, attribute: str, keys: Keys, old: Layer, new: Layer) -> None:
    name = parent.child_name(old)
    setattr(parent, attribute, with_part(getattr(parent, attribute), keys, new))
    parent._children[new] = name


def walk(layer: Layer, path: str = "", around: tuple[Layer, ...] = ()) -> Iterator[tuple[str, Layer]]:
    """Yield every layer below ``layer`` with its path, parents first; ``around`` are the layers around it."""
    for place in places(layer):
        inner = join_path(path, place.name)
        if any(place.child is other for other in (*around, layer)):
            raise ModelError(
                f"layer '{inner}' contains itself",
                facts=[f"attribute '{place.attribute}' of {type(layer).__name__} is a layer around it"],
                hint="do not store a layer around another one in its attributes",
            )
        yield inner, place.child
        yield from walk(place.child, inner, (*around, layer))


def _accepts(target: Target, path: str, layer: Layer) -> bool:
    if isinstance(target, str):
        return matches(path, target)
    return layer is target if isinstance(target, Layer) else isinstance(layer, target)


def _resolved(layer: Layer, target: Target) -> Target:
    """Return the path of the layer that produces the value named by ``target``, unless it is the path of a layer."""
    children = list(walk(layer))
    if not isinstance(target, str) or any(_accepts(target, path, child) for path, child in children):
        return target
    for path, model in [("", layer), *children]:
        for step in model.steps if isinstance(model, Model) else ():
            if any(join_path(path, value.name) == target for value in step.results.values() if value.name):
                return join_path(path, step.name)
    return target


def find(layer: Layer, target: Target) -> dict[str, Layer]:
    """Return the layers below ``layer`` by path that match a path, a pattern such as ``"*.attention"``, or a class.

    The name of a value, such as ``"block.hidden"``, denotes the layer that produces it.
    """
    layers: dict[str, Layer] = {}
    target = _resolved(layer, target)
    for path, child in walk(layer):
        if _accepts(target, path, child):
            # A wrapper precedes the layer within it, which has the same path.
            layers.setdefault(path, child)
    return layers


def replace(layer: Layer, target: Target, replacement: Replacement) -> None:
    """Replace the matching layers below ``layer`` in place, outermost first.

    ``replacement`` is a layer, of which each match gets a copy, or a function of the old layer. A layer that occurs
    several times is replaced by one new layer, so it still shares its parameters. Paths and names do not change.
    """
    replaced: dict[int, Layer] = {}
    target = _resolved(layer, target)
    if not _replace(layer, target, replacement, "", replaced):
        paths = [path for path, _ in walk(layer)]
        suggestions = closest(target, paths, 1) if isinstance(target, str) else []
        raise ModelError(
            f"no layer matches {target!r}",
            facts=[f"at {user_location()}", f"layers: {', '.join(paths[:12])}{', ...' if len(paths) > 12 else ''}"],
            hint=f"did you mean '{suggestions[0]}'?" if suggestions else "walk() lists the paths",
        )


def _replace(layer: Layer, target: Target, replacement: Replacement, path: str, replaced: dict[int, Layer]) -> int:
    count = 0
    for place in list(places(layer)):
        inner = join_path(path, place.name)
        if _accepts(target, inner, place.child):
            new = replaced.get(id(place.child))
            if new is None:
                new = replaced[id(place.child)] = _new_layer(replacement, place.child, inner)
                if not any(child is place.child for child in (new, *(child for _, child in walk(new)))):
                    new._is_replacement = True
            layer.accept_child(place.child, new)
            place.replace_child(new)
            count += 1
        else:
            count += _replace(place.child, target, replacement, inner, replaced)
    return count


def _new_layer(replacement: Replacement, old: Layer, path: str) -> Layer:
    new = deepcopy(replacement) if isinstance(replacement, Layer) else replacement(old)
    if not isinstance(new, Layer):
        raise ModelError(
            f"the replacement of '{path}' is a {type(new).__name__}, expected a layer",
            facts=[f"returned by {replacement!r}"],
        )
    return new
