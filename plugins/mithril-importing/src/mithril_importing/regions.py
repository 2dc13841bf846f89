"""Regions: the operations of a source's graph, nested by the modules that contain them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple


class Scope(NamedTuple):
    """A module around an operation: its path in the source, and which of its calls this is."""

    path: str
    call: str = ""


class Param(NamedTuple):
    """An operand that is a parameter, by its name in the source."""

    name: str


class Read(NamedTuple):
    """An operand that is a value, by its name in the source's graph."""

    name: str


@dataclass(frozen=True, eq=False)
class Operation:
    """An operation of a source's graph; attributes are operands, too."""

    source: Any  # the importer's node
    scopes: tuple[Scope, ...]  # outermost first
    reads: tuple[str, ...]  # tensors of the graph, without parameters, states and constants
    results: tuple[str, ...]  # tensors
    kind: str = ""  # the name of an operation that patterns know
    operands: tuple[Any, ...] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Operation:
        return self


@dataclass(frozen=True, eq=False)
class Region:
    """Consecutive operations of a module; ``reads`` and ``results`` are the values that cross its border."""

    scope: Scope
    items: tuple[Operation | Region, ...]
    reads: tuple[str, ...]
    results: tuple[str, ...]

    def __deepcopy__(self, memo: dict[int, Any]) -> Region:
        return self

    def operations(self) -> Iterator[Operation]:
        """Yield all operations, in order."""
        for item in self.items:
            if isinstance(item, Region):
                yield from item.operations()
            else:
                yield item

    def inner(self) -> list[Region]:
        """Return the regions directly within this one."""
        return [item for item in self.items if isinstance(item, Region)]


def nested(operations: Sequence[Operation], results: Sequence[str]) -> Region:
    """Return the region of a whole graph, whose ``results`` are its outputs."""
    readers = Counter(results)
    for operation in operations:
        readers.update(set(operation.reads))
    return _region(Scope(""), list(operations), 0, readers)


def _region(scope: Scope, operations: list[Operation], depth: int, readers: Counter[str]) -> Region:
    items: list[Operation | Region] = []
    for inner, group in groupby(operations, key=lambda o: o.scopes[depth] if len(o.scopes) > depth else None):
        part = list(group)
        items += part if inner is None else [_region(inner, part, depth + 1, readers)]
    produced = dict.fromkeys(name for operation in operations for name in operation.results)
    reads_here = Counter(name for operation in operations for name in set(operation.reads))
    return Region(
        scope,
        tuple(items),
        tuple(dict.fromkeys(n for o in operations for n in o.reads if n not in produced)),
        tuple(name for name in produced if readers[name] > reads_here[name]),
    )
