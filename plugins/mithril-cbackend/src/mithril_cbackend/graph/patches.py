"""Convolutions of disjoint patches as products: the kernel is as long as the stride, so that no pixel is read twice.

A patch becomes a row, copied in runs as long as the kernel. The phases and columns of a convolution would be copied
pixel by pixel, since the stride lies between neighbors in a phase.
"""

from __future__ import annotations

import math
from typing import Any

from mithril import ops
from mithril.graph import Decisions, Editor, Graph, Node, Value, float32, is_static
from mithril_cbackend.lowering.element.element_reader import operand, shape_of

# Pixels of a run. On an Intel Xeon with AVX-512, patches of 8 to 16 pixels took 0.5 to 1.0 of the time of columns, and
# signals of 160 samples 0.43 (benchmarks/bench_sweep.py); shorter ones were not measured.
MIN_RUN = 8


def as_products(graph: Graph, decisions: Decisions) -> Graph:
    """Return the graph with products in place of convolutions of disjoint patches."""
    nodes = [node for node in graph.nodes if is_of_patches(node)]
    if not nodes:
        return graph
    decisions.record("choice", f"{len(nodes)} convolutions of disjoint patches are products of their rows")
    editor: Editor = graph.edit()
    for node in nodes:
        current = editor.producer(node.result)  # its operands may have been replaced
        assert current is not None
        with editor.before(current):
            result = product(current)
        editor.replace_value(node.result, result)
        editor.erase_dead(current)
    return editor.freeze()


def is_of_patches(node: Node) -> bool:
    """Whether a node is a convolution of disjoint patches, whose rows are long enough."""
    if node.op is not ops.conv or node.result.dtype is not float32 or node.attributes["groups"] != 1:
        return False
    shapes = [*shape_of(operand(node)), *shape_of(operand(node, 1))]
    kernel = shape_of(operand(node, 1))[2:]
    return is_static(shapes) and 0 not in shapes and kernel == node.attributes["stride"] and kernel[-1] >= MIN_RUN


def product(node: Node) -> Value:
    """Return the product of the patches, as rows, with the weights."""
    weights = operand(node, 1)
    batch, channels, *_ = shape_of(operand(node))
    features, _, *kernel = shape_of(weights)
    counts, axes = shape_of(node.result)[2:], range(len(kernel))
    image = cut(operand(node), counts, kernel, node.attributes["padding"])
    split = ops.reshape(image, shape=(batch, channels, *(n for pair in zip(counts, kernel, strict=True) for n in pair)))
    order = (0, *(2 + 2 * k for k in axes), 1, *(3 + 2 * k for k in axes))
    size = channels * math.prod(kernel)
    rows = ops.reshape(ops.transpose(split, perm=order), shape=(batch * math.prod(counts), size))
    matrix = ops.transpose(ops.reshape(weights, shape=(features, size)), perm=(1, 0))
    result = ops.reshape(ops.matmul(rows, matrix), shape=(batch, *counts, features))
    return ops.transpose(result, perm=(0, len(kernel) + 1, *(1 + k for k in axes)))


def cut(image: Value, counts: Any, kernel: Any, padding: Any) -> Value:
    """Return the pixels of all patches: padded, and without those after the last patch."""
    sizes = shape_of(image)[2:]
    spans = [n * k - before for n, k, (before, _) in zip(counts, kernel, padding, strict=True)]
    if any(span < size for span, size in zip(spans, sizes, strict=True)):
        image = image[(slice(None), slice(None), *(slice(0, span) for span in spans))]
    widths = [(before, max(0, span - n)) for n, span, (before, _) in zip(sizes, spans, padding, strict=True)]
    if not any(map(any, widths)):
        return image
    # Stored, so that the copy of the patches has no conditions.
    (image,) = ops.barrier(ops.pad(image, widths=((0, 0), (0, 0), *widths)))
    return image
