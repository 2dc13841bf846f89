"""A graph that is parsed from text, or rebuilt, at its first use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mithril.ir import Graph, parse


class LazyGraph:
    """A graph whose first ``get()`` parses the text or calls the function; attributes are forwarded to the graph."""

    __slots__ = ("_graph", "_make")

    def __init__(self, graph: Graph | str | Callable[[], Graph]) -> None:
        self._graph = graph if isinstance(graph, Graph) else None
        self._make = None if isinstance(graph, Graph) else graph

    def get(self) -> Graph:
        if self._graph is None:
            assert self._make is not None
            self._graph, self._make = parse(self._make) if isinstance(self._make, str) else self._make(), None
        return self._graph

    def __getattr__(self, name: str) -> Any:
        return getattr(self.get(), name)
