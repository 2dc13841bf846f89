"""The frontend for graphs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from mithril.backend import Backend, EncodedWeight, to_numpy
from mithril.compiler.frontend import TraceRequest
from mithril.compiler.initializers import Array, Index, initialize
from mithril.compiler.unused_parts import Unused, unused_inputs, without_inputs
from mithril.graph import (
    Builder,
    DTypeError,
    Graph,
    Input,
    ModelError,
    Node,
    ShapeError,
    TensorType,
    Value,
    bind,
    dtype as as_dtype,
    float32,
    is_static,
    substitute_sizes,
    unknown,
)


class GraphInput:
    """An input of the graph."""

    required = True
    produced: frozenset[str] = frozenset()

    def __init__(self, declared: Input) -> None:
        self.name = declared.name
        self.shape: tuple[Any, ...] = declared.type.shape
        self.dtype = declared.type.dtype
        self.where = "an input of the graph"


class GraphSource:
    """The source of a graph, with the graph's own inputs, parameters and states."""

    pretrained: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, graph: Graph, *, outputs: Sequence[str] | None = None, inference: bool = False) -> None:
        self.name = graph.name
        self.inference = inference
        self.layers: Sequence[str] = sorted({node.origin.path for node in graph.nodes})
        if outputs is not None:
            by_name = {r.name: r for r in graph.results if r.role != "state"}
            for name in outputs:
                if name not in by_name:
                    message, facts, hint = unknown("output of the graph", name, list(by_name))
                    raise ModelError(message, facts=facts, hint=hint)
            graph = graph.replaced(results=(*(by_name[n] for n in outputs), *graph.results_of("state")))
        inputs = unused_inputs(graph, "input", "cotangent")
        params = unused_inputs(graph, "param", "state")
        self.unused = Unused(inputs, params)
        self._graph = graph = without_inputs(graph, {*inputs, *params})
        self.inputs = [GraphInput(i) for i in graph.with_role("input", "cotangent")]
        self.outputs: Sequence[str] = [r.name for r in graph.results if r.role != "state"]

    def __fingerprint__(self) -> tuple[Any, ...]:
        return (self._graph,)

    def expects(self, name: str) -> tuple[tuple[Any, ...] | None, Any] | None:
        declared = next((d for d in self.inputs if d.name == name), None)
        return None if declared is None else (declared.shape, declared.dtype)

    def graph(self, types: Mapping[str, TensorType], request: TraceRequest) -> Graph:
        """Return the graph at the sizes of ``types``, its constant inputs replaced by their values."""
        graph = self._graph
        declared = {i.name: i.type for i in graph.with_role("input", "cotangent")}
        for name, t in types.items():
            if t.dtype is not declared[name].dtype:
                raise DTypeError(
                    f"Type mismatch: expected {declared[name].dtype}, got {t.dtype}", facts=[f"input '{name}'"]
                )
        changed = {n: t.shape for n, t in types.items() if t.shape != declared[n].shape}
        if changed:
            if not all(is_static(shape) for shape in changed.values()):
                raise ShapeError(
                    "shapes of graph inputs can only replace symbolic sizes by numbers",
                    facts=[f"'{n}' is {declared[n]}" for n in changed],
                )
            sizes = bind({n: declared[n].shape for n in changed}, {n: tuple(map(int, s)) for n, s in changed.items()})
            graph = substitute_sizes(graph, sizes)
        return with_constants(graph, request.constants) if request.constants else graph

    def initial(self, inputs: Iterable[Input], seed: int, index: Index | None = None) -> dict[str, Array]:
        return initialize(inputs, seed, self.pretrained, index)


def with_constants(graph: Graph, constants: Mapping[str, Any]) -> Graph:
    """Return the graph with some inputs fixed to values."""
    with Builder(graph.name) as builder:
        arguments = [
            builder.constant(np.asarray(constants[i.name]), i.type.dtype, name=i.name)
            if i.role in ("input", "cotangent") and i.name in constants
            else builder.input(i.name, i.type.shape, i.type.dtype, i.role, tags=i.tags, of=i.of)
            for i in graph.arguments
        ]
        results = builder.inline(graph, arguments)
    return builder.build(graph.carrying(results))


def with_fixed_parameters(graph: Graph, arrays: Mapping[str, Any], backend: Backend) -> Graph:
    """Return the graph with parameters and state replaced by constants: copies, except of arrays that cannot change.

    Quantized values of weights, which the backend reads, are constants as well.
    """
    inputs: list[Input] = []
    readers: list[Node] = []
    for i in graph.inputs:
        if i.role not in ("param", "state") or i.name not in arrays:
            inputs.append(i)
        elif isinstance(arrays[i.name], EncodedWeight) and i.type.dtype is float32:
            quantized, reader = _encoded(i, arrays[i.name], backend)
            inputs += quantized
            readers.append(reader)
        else:
            inputs.append(_constant(i, to_numpy(arrays[i.name])))
    return graph.replaced(inputs=tuple(inputs), nodes=(*readers, *graph.nodes))


def _encoded(i: Input, weight: EncodedWeight, backend: Backend) -> tuple[list[Input], Node]:
    """Return the parts of a weight as constants, and the node whose result takes the place of the input."""
    operation = backend.reading_quantized(weight)
    assert operation is not None
    op, attributes = operation
    constants = []
    for part, array in weight.parts.items():
        value = Value(f"{i.name}.{part}", TensorType(as_dtype(array.dtype.name), array.shape))
        constants.append(_constant(Input(value, "param"), array))
    return constants, Node(op, tuple(c.value for c in constants), attributes, (i.value,))


def _constant(i: Input, array: Array) -> Input:
    dtype = i.type.dtype.numpy
    if _is_fixed(array) and array.dtype == dtype and array.flags.c_contiguous:
        return Input(i.value, "constant", array, i.tags)  # programs for several sizes share it
    data = np.array(array, dtype, order="C")
    data.setflags(write=False)
    return Input(i.value, "constant", data, i.tags)


def _is_fixed(array: Any) -> bool:
    """Whether an array and all arrays that it is a view of are read-only, such as one of a mapped file."""
    while isinstance(array, np.ndarray) and not array.flags.writeable:
        array = array.base
    return not isinstance(array, np.ndarray)
