"""The layers that a layer stores in its attributes, directly or in lists, tuples and dictionaries."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any, TypeVar

V = TypeVar("V")
Keys = tuple[Any, ...]  # of an item in nested containers

# Attributes of every layer that contain layers, or much else, which are not its parts.
_NO_PARTS = {"arguments", "pretrained", "tags", "_children"}


class LayerMap(MutableMapping[Any, V]):
    """A mapping from layers, which it keeps alive, compared by identity: those that are dataclasses have no hash."""

    def __init__(self, items: Iterable[tuple[Any, V]] = ()) -> None:
        self._items: dict[int, tuple[Any, V]] = {}
        self.update(items)

    def __getitem__(self, layer: Any) -> V:
        return self._items[id(layer)][1]

    def __setitem__(self, layer: Any, value: V) -> None:
        self._items[id(layer)] = (layer, value)

    def __delitem__(self, layer: Any) -> None:
        del self._items[id(layer)]

    def __iter__(self) -> Iterator[Any]:
        return (layer for layer, _ in self._items.values())

    def __len__(self) -> int:
        return len(self._items)

    def __getstate__(self) -> list[tuple[Any, V]]:
        return list(self._items.values())

    def __setstate__(self, items: list[tuple[Any, V]]) -> None:
        self._items = {id(layer): (layer, value) for layer, value in items}  # other addresses than where it was pickled


def parts(layer: Any, kind: type) -> Iterator[tuple[str, Keys, Any]]:
    """Yield the parts of a class: the attribute, the keys within its containers, and the part."""
    for attribute, value in list(vars(layer).items()):
        if attribute not in _NO_PARTS:
            for keys, part in within(value, kind):
                yield attribute, keys, part


def within(value: Any, kind: type, keys: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    """Yield the parts of a class in nested containers, with the keys of each."""
    if isinstance(value, kind):
        yield keys, value
    elif isinstance(value, (list, tuple, dict)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from within(item, kind, (*keys, key))


def slot(attribute: str, keys: Keys) -> str:
    """Return the name of a part: its attribute and keys, ``"blocks.0"``."""
    return ".".join([attribute, *map(str, keys)])


def with_part(value: Any, keys: Keys, part: Any) -> Any:
    """Return copies of nested containers in which another part has these keys."""
    if not keys:
        return part
    key, *rest = keys
    changed = with_part(value[key], tuple(rest), part)
    if isinstance(value, dict):
        return {**value, key: changed}
    items = [*value[:key], changed, *value[key + 1 :]]
    return tuple(items) if isinstance(value, tuple) else items
