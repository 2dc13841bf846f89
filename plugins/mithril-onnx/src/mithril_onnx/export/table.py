"""The table of exports: one function per operation, with the attributes that it reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mithril.graph import Node

Write = Callable[..., Any]


@dataclass(frozen=True)
class ExportRow:
    """How an operation is written: for nodes whose attributes outside of ``reads`` have their defaults."""

    write: Write  # (writer, node, *operand names) -> name or names of the results
    reads: tuple[str, ...]
    since: int
    when: Callable[[Node], bool] | None


ROWS: dict[str, list[ExportRow]] = {}


def row(*names: str, reads: tuple[str, ...] = (), since: int = 1, when: Callable[[Node], bool] | None = None) -> Any:
    """Register the decorated function for operations by name."""

    def enter(write: Write) -> Write:
        for name in names:
            ROWS.setdefault(name, []).insert(0, ExportRow(write, reads, since, when))
        return write

    return enter


def row_for(node: Node, opset: int) -> ExportRow | None:
    """Return the latest row that accounts for every attribute of a node, or None."""
    for candidate in ROWS.get(node.op.name, ()):
        if candidate.since > opset or (candidate.when is not None and not candidate.when(node)):
            continue
        unread = (n for n in node.attributes if n not in candidate.reads)
        if all(n in node.op.attributes and node.attributes[n] == node.op.attributes[n].default for n in unread):
            return candidate
    return None
