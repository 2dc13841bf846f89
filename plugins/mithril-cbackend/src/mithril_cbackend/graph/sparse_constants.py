"""Products with weights of resampling as weighed sums of gathered elements.

Resampling multiplies each axis by a matrix whose columns have two or four nonzero elements: the product of an axis of
176 pixels has 88 times as many terms as bilinear weights. Sums without the zeros differ at infinite and nan elements,
whose products with them are nan: ``docs/semantics.md`` leaves these results of ``resize`` open. It leaves no others
open, so that permutations and other constants of few elements remain products.

Along the last axis, each gathered element is loaded by itself, so that short sums remain products; along other axes
rows are gathered, which are vectors.
"""

from __future__ import annotations

from functools import reduce
from operator import add
from typing import Any

import numpy as np

from mithril import ops
from mithril.graph import Editor, Graph, Node, Value, float32, float64
from mithril_cbackend.lowering.element.element_reader import operand, shape_of

MAX_TERMS = 4  # nonzero elements of a column: those of bicubic weights
# Products of a sum, for each nonzero element, that take as long as a gathered element. An estimate, not tuned: on
# AVX-512 a gather takes about a cycle for each element, and a product 1/32 of one.
PRODUCTS_PER_GATHER = 32
SAMPLE = 8  # columns that are counted first: most constants are dense
Array = np.ndarray[Any, Any]


def rewritten(graph: Graph) -> Graph:
    """Return the graph with weighed sums in place of products that take longer."""
    products = [(n, data) for n in graph.nodes if n.op is ops.matmul and (data := _constant(graph, n)) is not None]
    if not products:
        return graph
    editor: Editor = graph.edit()
    for node, data in products:
        terms = int(np.count_nonzero(data, axis=0).max())
        if len(data) >= terms * (1 if _of_rows(editor, node) else PRODUCTS_PER_GATHER):
            editor.replace_value(node.result, _weighed(editor, node, data, terms))
            editor.erase_dead(node)
    return editor.freeze()


def _constant(graph: Graph, node: Node) -> Array | None:
    """Return the second operand of a product if it is a constant matrix of weights of resampling."""
    source = graph.input_of.get(operand(node, 1))
    if source is None or source.role != "constant" or node.result.dtype not in (float32, float64):
        return None
    data = np.asarray(source.data)
    if data.ndim != 2 or 0 in data.shape or operand(node).ndim < 2:
        return None
    few = all(np.count_nonzero(part, axis=0).max() <= MAX_TERMS for part in (data[:, :SAMPLE], data))
    return data if few and len(data) > MAX_TERMS and _resamples(data) else None


def _resamples(data: Array) -> bool:
    """Whether each column averages neighbors, in the order of the columns, and some column more than one."""
    used = data != 0
    first, last = used.argmax(axis=0), len(data) - 1 - used[::-1].argmax(axis=0)
    are_neighbors = used.any(axis=0).all() and (last - first < MAX_TERMS).all() and (np.diff(first) >= 0).all()
    return bool(are_neighbors and (first < last).any() and np.allclose(data.sum(axis=0), 1.0, atol=1e-5))


def _of_rows(editor: Editor, node: Node) -> bool:
    """Whether the product is between two transposes that exchange its axis with another one."""
    before, after = editor.producer(operand(node)), editor.users(node.result)
    return (
        before is not None
        and before.op is ops.transpose
        and len(after) == 1
        and after[0].op is ops.transpose
        and before.attributes["perm"][-1] != len(shape_of(operand(node))) - 1
    )


def _weighed(editor: Editor, node: Node, data: Array, count: int) -> Value:
    """Return the sum of as many weighed gathers; columns with fewer nonzero elements have weights of zero."""
    order = np.argsort(data == 0, axis=0, kind="stable")[:count]  # nonzero elements first, by position
    with editor.before(node) as b:
        # A barrier stores the operand: each gather would compute it again.
        swap = editor.producer(operand(node)) if _of_rows(editor, node) else None
        (x,) = ops.barrier(operand(node if swap is None else swap))
        x = x if swap is None else ops.transpose(x, perm=swap.attributes["perm"])
        terms = []
        for positions in order:
            weights = np.take_along_axis(data, positions[None], axis=0)[0]
            elements = ops.take(x, b.constant(positions.astype(np.int32), name="positions"), axis=-1)
            terms.append(elements * b.constant(weights, name="weights"))
        result: Value = reduce(add, terms)
    return result
