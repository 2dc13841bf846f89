"""Programs with dynamic sizes: one is planned per set of sizes, and the latest ones are cached."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mithril.graph import BackendError, Dim, Graph, InputError, Node, TensorType, Value, bind, substitute, types_of
from mithril_ggml.program.executable import GGMLExecutable

KEPT = 16  # programs, each with an arena of its own


class SizedExecutable:
    """Makes a program for the sizes of each call, and calls it."""

    source = None

    def __init__(self, graph: Graph, lowered: frozenset[str], make: Callable[[Graph], GGMLExecutable]) -> None:
        self.graph = graph
        self.lowered = lowered
        self._make = make
        self._programs: OrderedDict[tuple[tuple[int, ...], ...], GGMLExecutable] = OrderedDict()
        self._lock = threading.Lock()
        self._open = [(i.name, i.role == "param") for i in graph.arguments if not i.type.is_static]

    def __call__(self, params: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        key = tuple((params if param else inputs)[name].shape for name, param in self._open)
        with self._lock:
            program = self._programs.get(key)
            if program is None:
                program = self._programs[key] = self._make(self._bound_graph(params, inputs))
                if len(self._programs) > KEPT:
                    self._programs.popitem(last=False)
            else:
                self._programs.move_to_end(key)
        return program(params, inputs)

    @property
    def programs(self) -> tuple[GGMLExecutable, ...]:
        """Those made so far that are kept."""
        return tuple(self._programs.values())

    def of_sizes(self, sizes: Mapping[str, int]) -> GGMLExecutable:
        """Return a program for these sizes of the symbols, to look at."""
        return self._make(bind_sizes(self.graph, sizes))

    def _bound_graph(self, params: Mapping[str, Any], inputs: Mapping[str, Any]) -> Graph:
        shapes = {}
        for i in self.graph.arguments:
            x = (params if i.role == "param" else inputs).get(i.name)
            if x is None:
                raise InputError(f"input '{i.name}' is missing")
            shapes[i.name] = tuple(np.shape(x))
        sizes = bind({i.name: i.type.shape for i in self.graph.arguments}, shapes)
        return bind_sizes(self.graph, sizes)


def is_static(graph: Graph) -> bool:
    """Whether every size is known; operations inside regions have theirs from outside."""
    values = [*(i.value for i in graph.inputs), *(v for node in graph.nodes for v in node.results)]
    return all(v.type.is_static for v in values) and all(is_static(r) for node in graph.nodes for r in node.regions)


def bind_sizes(graph: Graph, sizes: Mapping[str, int]) -> Graph:
    """Substitute numbers for the symbols of a graph and its regions; infer, and so check, all types again."""
    new: dict[Value, Value] = {}
    inputs = []
    for i in graph.inputs:
        new[i.value] = Value(i.value.name, _type(i.type, sizes))
        inputs.append(type(i)(new[i.value], i.role, i.data, i.tags))
    nodes = [_node(node, sizes, new) for node in graph.nodes]
    outputs = tuple(new[v] for v in graph.outputs)
    return Graph(tuple(inputs), tuple(nodes), graph.carrying(outputs), graph.name)


def _node(node: Node, sizes: Mapping[str, int], new: dict[Value, Value]) -> Node:
    operands = tuple(None if v is None else new[v] for v in node.operands)
    attributes = {name: _numbers(value, sizes) for name, value in node.attributes.items()}
    regions = tuple(bind_sizes(region, sizes) for region in node.regions)
    operand_types = types_of(operands)
    attributes = node.op.canonical(operand_types, attributes)
    types = node.op.infer(operand_types, attributes, regions)
    for value, t in zip(node.results, types, strict=True):
        if not t.is_static:
            raise BackendError(f"the size of '{value.name}' does not follow from the inputs: {t}")
        new[value] = Value(value.name, t)
    results = tuple(new[v] for v in node.results)
    return Node(node.op, operands, attributes, results, regions, node.origin, node.tags)


def _type(t: TensorType, sizes: Mapping[str, int]) -> TensorType:
    return t if t.is_static else TensorType(t.dtype, tuple(substitute(d, sizes) for d in t.shape))


def _numbers(value: Any, sizes: Mapping[str, int]) -> Any:
    if isinstance(value, tuple):
        return tuple(_numbers(v, sizes) for v in value)
    return substitute(value, sizes) if isinstance(value, Dim) else value
