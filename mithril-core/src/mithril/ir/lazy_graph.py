"""A graph that is kept as text until somebody wants to see it."""

from __future__ import annotations

from typing import Any

from mithril.ir.core import Graph


class Deferred:
    """``get`` reads the text at the first call; attributes are the graph's own."""

    __slots__ = ("_graph", "_text")

    def __init__(self, graph: Graph | str) -> None:
        self._graph = graph if isinstance(graph, Graph) else None
        self._text = graph if isinstance(graph, str) else ""

    def get(self) -> Graph:
        if self._graph is None:
            from mithril.ir.parse import parse

            self._graph, self._text = parse(self._text), ""
        return self._graph

    def __getattr__(self, name: str) -> Any:
        return getattr(self.get(), name)
