"""Weights as arguments of a program that holds them, in the layout that its products and convolutions read.

These are constants of the program (``static_inference``), or parameters of one binding (``inference``).

XLA stores a constant several times: as an array, as a literal of the program, and as the literal that its compiler
folds it to. An argument is stored once. Transposed in advance, it is multiplied as fast as a constant.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakValueDictionary

import jax
import numpy as np

from mithril import ops
from mithril.backend import Forward
from mithril.graph import Graph, Input, Node, TensorType, Value, bfloat16, is_product, iterate
from mithril.system import ArrayCache
from mithril_jax.lowering import kernel_exceeds_image

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


@dataclass(frozen=True)
class Held:
    """A constant that becomes an argument, and the order in which its axes are stored."""

    constant: Array
    order: tuple[int, ...]

    def placed(self, transfer: Callable[[Array], jax.Array], placement: Hashable) -> jax.Array:
        """Return the array of a placement, which ``transfer`` makes unless a program holds it already."""
        shared: WeakValueDictionary[Any, jax.Array] = HELD.get(self.constant, "held", WeakValueDictionary)
        weight = shared.get((self.order, placement))
        if weight is None:
            weight = shared[self.order, placement] = transfer(self.constant.transpose(self.order))
        return weight


def extracted(graph: Graph) -> tuple[Graph, dict[str, Held]]:
    """Return the graph with weights of products and convolutions as parameters, and their elements."""
    readers = _readers(graph)
    weights: dict[str, Held] = {}
    inputs: list[Input] = []
    restored: list[Node] = []
    renamed: dict[Value, Value] = {}
    for i in graph.inputs:
        data = i.data
        used = readers.get(i.value)
        if used is None or (data is not None and data.nbytes < SMALLEST):
            inputs.append(i)
            continue
        order = _order(i.value, used)
        value = Value(i.name, TensorType(i.type.dtype, tuple(i.type.shape[k] for k in order)))
        if data is not None:
            weights[i.name] = Held(np.asarray(data), order)
        # Constant folding may have transposed the parameter.
        axes = i.tags.get("axes", range(len(order)))
        tags = {**i.tags, "held_order": tuple(axes[k] for k in order)}
        inputs.append(replace(i, value=value, role="param", data=None, tags=tags))
        if order == SWAPPED and all(node.op is ops.transpose for node in used):
            renamed |= {node.result: value for node in used}
        elif order != tuple(range(len(order))):  # XLA's convolutions read any order, without a copy
            original = Value(f"{i.name}_original", i.type)
            attributes = ops.transpose.complete({"perm": tuple(np.argsort(order).tolist())})
            restored.append(Node(ops.transpose, (value,), attributes, (original,)))
            renamed[i.value] = original
        else:
            renamed[i.value] = value
    nodes = [
        node.replaced(operands=tuple(renamed.get(v, v) if v is not None else None for v in node.operands))
        for node in graph.nodes
        if not (node.op is ops.transpose and node.result in renamed)
    ]
    return graph.replaced(inputs=tuple(inputs), nodes=(*restored, *nodes)), weights


def arranged(graph: Graph, weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return the weights of a binding in the layout of the program's parameters."""
    orders = {i.name: i.tags["held_order"] for i in graph.with_role("param") if "held_order" in i.tags}
    return {n: x.transpose(orders[n]) if n in orders else x for n, x in weights.items()}


def orders(weights: Collection[Held]) -> str:
    """Return how many weights are stored in another order than they were bound in, as a text; empty if none is."""
    columns = sum(w.order == SWAPPED for w in weights)
    kernels = sum(len(w.order) > 2 and w.order != tuple(range(len(w.order))) for w in weights)
    parts = [f"{columns} matrices column by column"] * (columns > 0) + [f"{kernels} kernels channels last"] * (
        kernels > 0
    )
    return f"weights are stored in the order that is read: {', '.join(parts)}" if parts else ""


def _order(weight: Value, readers: Sequence[Node]) -> tuple[int, ...]:
    """Return the order of the axes that the readers read fastest: a convolution reads its kernel channels last."""
    rank = len(weight.shape)
    # with_contracted_rows reads the matrix that a transpose has as operand.
    if weight.dtype is bfloat16 and rank == 2:
        return SWAPPED if all(node.op is ops.matmul and node.operands[1] is weight for node in readers) else (0, 1)
    # The transpose is computed once, when the weight is placed, and leaves the program.
    if all(node.op is ops.transpose for node in readers):
        return SWAPPED
    if all(node.op is ops.conv and not kernel_exceeds_image(node) for node in readers):
        return (*range(2, rank), *SWAPPED)
    return tuple(range(rank))


def _readers(graph: Graph) -> dict[Value, list[Node]]:
    """Return the nodes that read each weight which only products, convolutions and look-ups of rows read.

    A product may read a matrix transposed.
    """
    users: dict[Value, list[Node]] = {}
    outer = set(graph.nodes)
    excluded = set(graph.outputs)
    candidates = {i.value for i in graph.inputs if i.role == "constant" or i.tags.get("bound")}
    for node, _ in iterate(graph):
        for v in node.operands:
            if v is not None and node in outer:
                users.setdefault(v, []).append(node)
            # A weight that a region reads stays a constant: nodes of regions are not rewritten here.
            elif v is not None:
                excluded.add(v)

    def is_reader(v: Value, node: Node) -> bool:
        if node.op is ops.take:
            return bool(node.attributes["axis"] == 0)
        return is_product(node) and (node.op is not ops.conv or node.operands[0] is not v)

    def is_transpose(node: Node) -> bool:
        """Whether the node is the transpose of a matrix that only products read."""
        if node.op is not ops.transpose or tuple(node.attributes["perm"]) != SWAPPED or node.result in excluded:
            return False
        return all(is_reader(node.result, n) for n in users.get(node.result, ()))

    def is_read(v: Value, nodes: list[Node]) -> bool:
        is_weight = v in candidates and v not in excluded and len(v.shape) >= 2 and v.dtype.is_float
        return is_weight and all(is_reader(v, node) or is_transpose(node) for node in nodes)

    return {v: nodes for v, nodes in users.items() if is_read(v, nodes)}
