"""Convolutions of 16-bit floats as convolutions of float32, whose templates are far faster than plain loops."""

from __future__ import annotations

import numpy as np

from mithril import ops
from mithril.base import bfloat16, float16
from mithril.ir import Editor, Graph, Value

CONVOLUTIONS = (ops.conv, ops.conv_input_grad, ops.conv_weight_grad)


def widened(graph: Graph) -> Graph:
    """Return the graph with operands of 16 bits converted before convolutions, and their results rounded."""
    small = [n for n in graph.nodes if n.op in CONVOLUTIONS and n.result.dtype in (bfloat16, float16)]
    if not small:
        return graph
    editor: Editor = graph.edit()
    upcast: dict[Value, Value] = {}
    for node in editor.nodes():
        if node.op not in CONVOLUTIONS or node.result.dtype not in (bfloat16, float16):
            continue
        with editor.before(node) as b:
            for v in node.operands:
                if v is not None and v not in upcast and v.dtype in (bfloat16, float16):
                    data = editor.data_of(v)
                    if data is None:
                        upcast[v] = ops.cast(v, dtype="float32")
                    else:
                        upcast[v] = b.constant(np.asarray(data).astype(np.float32), name=v.name)
            operands = [None if v is None else upcast.get(v, v) for v in node.operands]
            result = ops.cast(node.op(*operands, **node.attributes), dtype=node.result.dtype)
        editor.replace_value(node.result, result)
        editor.erase_dead(node)
    return editor.freeze()
