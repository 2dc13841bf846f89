"""Weights of products as arguments of a program that holds them, in the layout that its products read.

XLA stores a constant several times: as an array, as a literal of the program, and as the literal that its compiler
folds it to. An argument is stored once. Transposed in advance, it is multiplied as fast as a constant.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

import jax
import numpy as np

from mithril import ops
from mithril.backend import Forward
from mithril.base import TensorType
from mithril.ir import Graph, Input, Node, Value, iterate
from mithril.system import ArrayCache

SMALLEST = 1 << 16  # bytes; the call of a program takes longer with each argument
HELD: ArrayCache = ArrayCache()  # by constant, as long as a program lives: programs for other sizes share them
SWAPPED = (1, 0)
Array = np.ndarray[Any, Any]


class HeldCall:
    """A function of params and inputs that passes the weights that it holds."""

    def __init__(self, call: Forward, weights: Mapping[str, jax.Array], embedded: int) -> None:
        self.call, self.weights = call, weights
        self.embedded = embedded  # bytes of other large constants, which the program embeds
        self.jitted_call = getattr(call, "jitted_call", call)

    def __call__(self, params: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        return self.call({**params, **self.weights}, inputs)

    def forget_sizes(self) -> None:
        """Discard the compiled programs, one for each size."""
        forget = getattr(self.jitted_call, "forget_sizes", None)
        if forget is not None:
            forget()


def extracted(
    graph: Graph, array: Callable[[Array], jax.Array], placement: Hashable
) -> tuple[Graph, dict[str, jax.Array]]:
    """Return the graph with weights of products as parameters, and their arrays, which ``array`` puts there."""
    readers = _readers(graph)
    weights: dict[str, jax.Array] = {}
    inputs: list[Input] = []
    renamed: dict[Value, Value] = {}
    for i in graph.inputs:
        data = i.data
        used = readers.get(i.value)
        if i.role != "constant" or data is None or used is None or data.nbytes < SMALLEST or i.value in graph.outputs:
            inputs.append(i)
            continue
        is_transposed = all(node.op is ops.transpose for node in used)
        shape = i.type.shape[::-1] if is_transposed else i.type.shape
        value = Value(i.name, TensorType(i.type.dtype, shape))
        stored = np.asarray(data)
        matrix = stored.T if is_transposed else stored
        shared: WeakValueDictionary[Any, jax.Array] = HELD.get(stored, "held", WeakValueDictionary)
        weight = shared.get((is_transposed, placement))
        if weight is None:
            weight = shared[is_transposed, placement] = array(matrix)
        weights[i.name] = weight
        inputs.append(replace(i, value=value, role="param", data=None, tags={**i.tags, "held": True}))
        if is_transposed:
            renamed |= {node.result: value for node in used}
        else:
            renamed[i.value] = value
    nodes = [
        node.replaced(operands=tuple(renamed.get(v, v) if v is not None else None for v in node.operands))
        for node in graph.nodes
        if not (node.op is ops.transpose and node.result in renamed)
    ]
    return (graph.replaced(inputs=tuple(inputs), nodes=tuple(nodes)), weights) if weights else (graph, weights)


def _readers(graph: Graph) -> dict[Value, list[Node]]:
    """Return the nodes that read each matrix which only products and look-ups of rows read, perhaps transposed."""
    users: dict[Value, list[Node]] = {}
    outer = set(graph.nodes)
    excluded = set(graph.outputs)
    for node, _ in iterate(graph):
        for v in node.operands:
            if v is not None and node in outer:
                users.setdefault(v, []).append(node)
            elif v is not None:
                excluded.add(v)

    def is_product(node: Node) -> bool:
        return node.op is ops.matmul or (node.op is ops.take and node.attributes["axis"] == 0)

    def is_matrix(node: Node) -> bool:
        """Whether the node is the transpose of a matrix that only products read."""
        if node.op is not ops.transpose or tuple(node.attributes["perm"]) != SWAPPED or node.result in excluded:
            return False
        return all(is_product(n) for n in users.get(node.result, ()))

    def is_read(v: Value, nodes: list[Node]) -> bool:
        is_weight = v not in excluded and len(v.shape) == 2 and v.dtype.is_float
        return is_weight and all(is_product(node) or is_matrix(node) for node in nodes)

    return {v: nodes for v, nodes in users.items() if is_read(v, nodes)}
