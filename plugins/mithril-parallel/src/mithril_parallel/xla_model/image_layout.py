"""Which values a TPU's compiler stores in the layout of convolutions, and which of these it cuts into strips.

Small batches are converted ("space to batch"): if a device has fewer than eight images, each is cut along its last
axis into eight strips, which are convolved like a larger batch. Each strip has a margin from its neighbor.
"""

from __future__ import annotations

from math import prod

from mithril import ops
from mithril.graph import Graph, Value, is_layout
from mithril_parallel.placing.propagate import GraphSharding
from mithril_parallel.xla_model.convolutions import computes_image, is_pool
from mithril_parallel.xla_model.fusion_model import FusedGraph, fuse, pointwise
from mithril_parallel.xla_model.tiling import tiled_bytes

# The TPU's compiler cuts images into as many strips where a device has fewer of them (libtpu, ``bench_tpu.py``).
STRIPS = 8


def images(graph: Graph) -> frozenset[Value]:
    """Return the results of convolutions and the values computed from them pointwise or by pooling.

    A transposed image, such as one with channels last, is a matrix to the compiler, which selects its layout freely.
    """
    values: set[Value] = set()
    for node in graph.nodes:
        is_like_its_operand = (pointwise(node) and not is_layout(node)) or is_pool(node)
        ranks = {v.ndim for v in node.operands if v in values} if is_like_its_operand else set()
        values.update(v for v in node.results if computes_image(node) or v.ndim in ranks)
    return frozenset(values)


def with_strips(fused: FusedGraph, sharding: GraphSharding) -> FusedGraph:
    """Return the kernels on this mesh: fused again if images are cut into strips, otherwise unchanged."""
    shapes = {v: sharding.local(v) for v in images(fused.graph)}
    cut = frozenset(v for v, (n, *_, width) in shapes.items() if n < STRIPS <= width)
    conv_results = (node.result for node in fused.graph.nodes if node.op is ops.conv and node.result in cut)
    # One profitable image makes XLA convert all.
    if not any(shapes[v][-1] > STRIPS for v in conv_results):
        return fused
    return fuse(fused.graph, tpu=True, strips=cut)


def strip(width: int) -> int:
    """Return the columns of a strip, including its margin."""
    return width // STRIPS + (width > STRIPS)


def strip_bytes(shape: tuple[int, ...], itemsize: int) -> int:
    """Return the bytes of [N, C, ..., W] in strips: 8 N are the rows of the tiles, C their columns."""
    n, channels, *outer, width = shape
    return prod(outer) * strip(width) * tiled_bytes(n * STRIPS, channels, itemsize)
