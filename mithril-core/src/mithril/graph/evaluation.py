"""Reference interpreter: run a graph node by node on NumPy arrays, by the reference implementations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from mithril.graph.core import Graph, Node, Value
from mithril.graph.dims import Dim, Size, TensorType, substitute
from mithril.graph.dtypes import dtype as as_dtype
from mithril.graph.errors import InputError
from mithril.graph.guards import bind

# NumPy arrays by name.
Arrays = dict[str, np.ndarray[Any, Any]]


def evaluate(graph: Graph, arguments: Mapping[str, Any], rounding: Callable[[Any], Any] | None = None) -> Arrays:
    """Return the outputs by name for arrays by input name. Intermediate results are freed after their last use.

    ``rounding`` is applied to the results of every node.
    """
    values: dict[Value, Any] = {}
    for i in graph.inputs:
        if i.data is not None:
            values[i.value] = i.data
        elif i.name not in arguments:
            raise InputError(f"input '{i.name}' of the graph is missing", facts=[f"passed: {', '.join(arguments)}"])
        else:
            values[i.value] = np.asarray(arguments[i.name], dtype=i.type.dtype.numpy)
    sizes = bind({i.name: i.type.shape for i in graph.inputs}, {i.name: values[i.value].shape for i in graph.inputs})
    last = {v: k for k, node in enumerate(graph.nodes) for v in node.operands if v is not None}
    live = set(graph.outputs)
    for k, node in enumerate(graph.nodes):
        returned = node.op.evaluate(
            [None if v is None else values[v] for v in node.operands],
            _concrete(node, sizes),
            tuple(substitute_sizes(r, sizes) for r in node.regions),
        )
        results = returned if isinstance(returned, tuple) else (returned,)
        if rounding is not None:
            results = tuple(rounding(x) for x in results)
        values.update(zip(node.results, results, strict=True))
        for v in node.operands:
            if v is not None and last[v] == k and v not in live:
                values.pop(v, None)
    return {name: values[v] for name, v in zip(graph.output_names, graph.outputs, strict=True)}


def rounding_spread(graph: Graph, arguments: Mapping[str, Any], size: float) -> dict[str, float]:
    """Return the maximal change of each result when arguments and all operations have a relative error up to ``size``.

    It is large where terms cancel, as in gradients of norms, and of biases before a softmax, which are zero.
    """
    rng = np.random.default_rng(1)

    def perturb(x: Any) -> Any:
        x = np.asarray(x)
        is_float = as_dtype(x.dtype).is_float
        return (x * (1 + size * rng.uniform(-1, 1, x.shape))).astype(x.dtype) if is_float else x

    perturbed = evaluate(graph, {name: perturb(x) for name, x in arguments.items()}, perturb)
    exact = evaluate(graph, arguments)
    differences = {name: np.abs(perturbed[name].astype(np.float64) - x.astype(np.float64)) for name, x in exact.items()}
    return {name: float(np.max(x[np.isfinite(x)], initial=0.0)) for name, x in differences.items()}


def substitute_sizes(graph: Graph, sizes: Mapping[str, Size]) -> Graph:
    """Substitute symbolic sizes in types, attributes and regions; return the graph itself if ``sizes`` is empty."""
    if not sizes:
        return graph
    new_values: dict[Value, Value] = {}

    def made(value: Value) -> Value:
        shape = tuple(substitute(d, sizes) for d in value.shape)
        new_values[value] = Value(value.name, TensorType(value.dtype, shape))
        return new_values[value]

    inputs = tuple(replace(i, value=made(i.value)) for i in graph.inputs)
    nodes = tuple(
        Node(
            node.op,
            tuple(None if v is None else new_values[v] for v in node.operands),
            _concrete(node, sizes),
            tuple(made(v) for v in node.results),
            tuple(substitute_sizes(r, sizes) for r in node.regions),
            node.origin,
            node.tags,
        )
        for node in graph.nodes
    )
    return Graph(inputs, nodes, graph.carrying(new_values[v] for v in graph.outputs), graph.name)


def _concrete(node: Node, sizes: Mapping[str, Size]) -> Mapping[str, Any]:
    """Return the attributes with symbolic sizes replaced by the sizes of this call."""
    if not sizes:
        return node.attributes
    return {name: _fixed(value, sizes) for name, value in node.attributes.items()}


def _fixed(value: Any, sizes: Mapping[str, Size]) -> Any:
    if isinstance(value, Dim):
        return substitute(value, sizes)
    if isinstance(value, tuple):
        return tuple(_fixed(v, sizes) for v in value)
    return value
