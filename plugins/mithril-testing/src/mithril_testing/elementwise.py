"""Element-wise operations on special and on many ordinary values, in every dtype, as one graph."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from mithril import ops
from mithril.graph import (
    ALL,
    Arr,
    Builder,
    DType,
    Graph,
    MithrilError,
    Op,
    Shape,
    Value,
    bool_,
    decompose,
    float32,
    int32,
    operation_names,
)
from mithril_testing.cases import is_primitive
from mithril_testing.running import Array
from mithril_testing.sample_arrays import all_pairs, make_array, random_array, special_array

BEYOND = 4_096  # elements: more than any backend takes in one piece
# A tie between zeros of different signs has no winner: either zero is right.
EITHER_ZERO = operation_names("maximum", "minimum", "clip", "max", "min")


def accepted(op: Op, dtype: DType) -> bool:
    """Whether the operation takes operands of the dtype without a cast."""
    try:
        graph = call_graph(op, {"x": (dtype, [(2,)])})
    except MithrilError:
        return False
    return not any(node.op is ops.cast and node.op is not op for node in graph.nodes)


def call_graph(op: Op, calls: dict[str, tuple[DType, list[Shape]]]) -> Graph:
    """Return one graph of several calls, each with the dtype and, in turn, the shapes of its operands."""
    builder = Builder(op.name.replace(".", "_"))
    attributes = op.samples[0].attributes if op.samples else {}
    outputs: dict[str, Value] = {}
    with builder:
        for prefix, (dtype, shapes) in calls.items():
            operands = [
                builder.input(f"{prefix}/{name}", shapes[k % len(shapes)], bool_ if name == "condition" else dtype)
                for k, name in enumerate(op.operands)
            ]
            outputs[prefix] = op(*operands, **attributes)
    return builder.build(outputs)


def special_calls(op: Op, dtypes: Collection[DType]) -> tuple[Graph, dict[str, Array]]:
    """Return a call for each dtype on all combinations of its special values and on thousands of random ones."""
    calls: dict[str, tuple[DType, list[Shape]]] = {}
    arguments: dict[str, Array] = {}
    for dtype in (d for d in ALL if d in dtypes and accepted(op, d)):
        names = [n for n in op.operands if n != "condition"]
        grids = all_pairs(special_array(dtype), len(names))
        count = grids[0].size + BEYOND
        for k, (name, grid) in enumerate(zip(names, grids, strict=True)):
            arguments[f"{dtype}/{name}"] = np.concatenate([grid, random_array(dtype, BEYOND, k)])
        if "condition" in op.operands:
            arguments[f"{dtype}/condition"] = random_array(bool_, count)
        calls[dtype.name] = (dtype, [(count,)])
    graph = call_graph(op, calls)
    return graph, {i.name: arguments[i.name] for i in graph.arguments}


def strided_calls(op: Op) -> tuple[Graph, dict[str, Array]]:
    """Return calls on views: transposed, reversed, repeated along an axis, read-only, and without elements."""
    dtype = next((d for d in (float32, int32, bool_) if accepted(op, d)), bool_)
    sample = op.samples[0].operands[0] if op.samples and op.samples[0].operands else None
    low, high = (sample.low, sample.high) if sample is not None else (-2.0, 2.0)
    graph = call_graph(
        op,
        {"broadcast": (dtype, [(3, 1, 2), (4, 1)]), "empty": (dtype, [(2, 0, 3), (1, 3)]), "views": (dtype, [(5, 6)])},
    )
    arguments = {}
    for k, i in enumerate(graph.arguments):
        shape = tuple(int(d) for d in i.type.shape)
        array = make_array(Arr(shape[::-1], i.type.dtype.name, low, high), f"{op.name}/{k}").T
        if i.name.startswith("views/") and k % 3 == 1:
            array = array[::-1, ::-1]
        elif i.name.startswith("views/") and k % 3 == 2:
            array = np.broadcast_to(array[:1], shape)
        elif i.name.startswith("views/"):
            array.flags.writeable = False
        arguments[i.name] = array
    return graph, arguments


def signs_of_zeros(graph: Graph) -> bool:
    """Whether the signs of zeros are defined: in no part of the graph does the larger or smaller of two zeros win."""
    parts = decompose(graph, is_primitive)
    return not any(node.op.name in EITHER_ZERO for node in parts.nodes)
