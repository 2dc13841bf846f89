"""A graph that is parsed from text at its first use, or rebuilt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

from mithril.ir import Graph, parse


class LazyGraph:
    """A graph whose first ``get()`` parses the text or calls the function; attributes are forwarded to the graph.

    Functions rebuild graphs with embedded weights, which a program has in a form of its own: such a graph lives as long
    as its users.
    """

    __slots__ = ("_graph", "_make", "_rebuilt")

    def __init__(self, graph: Graph | str | Callable[[], Graph]) -> None:
        self._graph = graph if isinstance(graph, Graph) else None
        self._make = None if isinstance(graph, Graph) else graph
        self._rebuilt: ref[Graph] | None = None

    def get(self) -> Graph:
        graph = self._graph if self._rebuilt is None else self._rebuilt()
        if graph is not None:
            return graph
        if callable(self._make):
            graph = self._make()
            self._rebuilt = ref(graph)
        else:
            assert self._make is not None
            graph = self._graph = parse(self._make)
            self._make = None
        return graph

    def __getattr__(self, name: str) -> Any:
        return getattr(self.get(), name)
