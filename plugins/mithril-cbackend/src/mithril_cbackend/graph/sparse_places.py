"""Products of sparse matrices read and write within their operands: computed positions and starts are made consistent.

Kernels of these products trust both. Constants are read here; other places are known to be consistent only at run time.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mithril import ops
from mithril.graph import Editor, Graph, Node
from mithril_cbackend.lowering.element.element_reader import operand
from mithril_cbackend.lowering.matmul.sparse_products import OPERATIONS


def checked(graph: Graph) -> Graph:
    """Return the graph in which products of sparse matrices, also those of regions, read consistent places."""
    editor: Editor = graph.edit()
    for node in graph.nodes:
        regions = tuple(map(checked, node.regions))
        if any(new is not old for new, old in zip(regions, node.regions, strict=True)):
            editor.replace_node(node, node.replaced(regions=regions))
        elif node.op in OPERATIONS and not _is_consistent(graph, node):
            values, positions, starts, x = node.operands
            with editor.before(node):
                positions, starts = ops.consistent_places(positions, starts, _blocks_in_row(node))
            editor.replace_node(node, node.replaced(operands=(values, positions, starts, x)))
    return editor.freeze()


def _blocks_in_row(node: Node) -> Any:
    values, x = operand(node), operand(node, 3)
    columns = node.attributes.get("columns", x.shape[0])
    return columns // values.shape[1] if values.ndim == 2 else columns


def _is_consistent(graph: Graph, node: Node) -> bool:
    """Whether positions and starts are constants that exist, in order."""
    sources = [graph.input_of.get(operand(node, k)) for k in (1, 2)]
    if any(source is None or source.role != "constant" for source in sources):
        return False
    positions, starts = (np.asarray(source.data) for source in sources if source is not None)
    blocks = _blocks_in_row(node)
    in_row = positions.min(initial=0) >= 0 and isinstance(blocks, int) and positions.max(initial=0) < blocks
    in_order = starts[0] == 0 and starts[-1] <= len(positions) and bool((np.diff(starts) >= 0).all())
    return bool(in_row and in_order)
