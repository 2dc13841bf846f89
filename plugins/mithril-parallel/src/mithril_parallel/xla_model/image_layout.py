"""Which values are images to a TPU's compiler, stored as convolutions want them, and which of them it cuts in strips.

Few images are cut ("space to batch"): where a device has less than eight, each is cut along its last axis into eight
strips, which are convolved like a larger batch. Each strip has a margin from its neighbor.
"""

from __future__ import annotations

from math import prod

from mithril import ops
from mithril.ir import Graph, Value
from mithril_parallel.placing.propagate import GraphSharding
from mithril_parallel.xla_model.convolutions import computes_image, is_pool
from mithril_parallel.xla_model.fusion_model import FusedGraph, fuse, pointwise
from mithril_parallel.xla_model.tiling import tiled_bytes

STRIPS = 8


def images(graph: Graph) -> frozenset[Value]:
    """Values that convolutions make, and what is computed of them point by point."""
    values: set[Value] = set()
    for node in graph.nodes:
        is_like_its_operand = pointwise(node) or is_pool(node)
        is_image = computes_image(node) or (is_like_its_operand and any(v in values for v in node.operands))
        if is_image:
            values.update(v for v in node.results if v.ndim >= 4)
    return frozenset(values)


def with_strips(fused: FusedGraph, sharding: GraphSharding) -> FusedGraph:
    """The kernels as they are on this mesh: others where images are cut, the same where none is."""
    shapes = {v: sharding.local(v) for v in images(fused.graph)}
    cut = frozenset(v for v, (n, *_, width) in shapes.items() if n < STRIPS <= width)
    conv_results = (node.result for node in fused.graph.nodes if node.op is ops.conv and node.result in cut)
    if not any(
        shapes[v][-1] > STRIPS for v in conv_results
    ):  # it is worth while for one, and then goes on to all others
        return fused
    return fuse(fused.graph, tpu=True, strips=cut)


def strip(width: int) -> int:
    """Columns of a strip, with its margin."""
    return width // STRIPS + (width > STRIPS)


def strip_bytes(shape: tuple[int, ...], itemsize: int) -> int:
    """Bytes of [N, C, ..., W] in strips: eight times N are the rows of the tile, C its columns."""
    n, channels, *places, width = shape
    return prod(places) * strip(width) * tiled_bytes(n * STRIPS, channels, itemsize)
