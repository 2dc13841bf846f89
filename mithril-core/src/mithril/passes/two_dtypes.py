"""Base of rewriters that hold values in two dtypes, with casts where a node needs the form that does not exist."""

from __future__ import annotations

from abc import ABC, abstractmethod

from mithril.graph import Builder, Graph, Node, Value, operation


class TwoDtypes(ABC):
    """Rewriter of a graph that holds each value in its dtype, in another one, or in both if both are needed.

    ``run()`` visits the nodes in order; ``visit`` emits each into ``builder``, registers the forms of its results in
    ``original`` (the dtype of the graph) or ``converted``, and sets ``changed`` if the node computes in another dtype.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.builder = Builder(graph.name)
        self.builder.inputs = list(graph.inputs)
        self.builder.guards = dict.fromkeys(graph.guards)
        for i in graph.inputs:
            self.builder.unique(i.name)
        self.original: dict[Value, Value] = {i.value: i.value for i in graph.inputs}
        self.converted: dict[Value, Value] = {}
        self.changed = False

    @abstractmethod
    def visit(self, node: Node) -> None:
        """Emit a node, and register the forms of its results."""

    def run(self) -> Graph:
        """Return the rewritten graph, whose results have their dtypes; the same object if nothing changed."""
        with self.builder:
            for node in self.graph.nodes:
                with self.builder.at(node.origin, node.tags):
                    self.visit(node)
            outputs = tuple(self.in_original(v) for v in self.graph.outputs)
        if not self.changed:
            return self.graph
        return self.graph.replaced(inputs=tuple(self.builder.inputs), nodes=tuple(self.builder.nodes), outputs=outputs)

    def in_original(self, value: Value) -> Value:
        """Return a value in its dtype; one that was computed in the other dtype is cast at its first use."""
        if value not in self.original:
            self.original[value] = operation("cast")(self.converted[value], dtype=value.dtype)
        return self.original[value]
