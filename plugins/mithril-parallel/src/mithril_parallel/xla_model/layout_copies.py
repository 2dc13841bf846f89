"""Layout copies of a TPU's compiler: images and kernels with the axis order that its convolutions require."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from mithril import ops
from mithril.graph import Node, Op, Value, is_windowed_product
from mithril_parallel.placing.propagate import GraphSharding
from mithril_parallel.placing.rules import sizes
from mithril_parallel.xla_model.convolutions import (
    image_size,
    is_image_gradient,
    kernel_size,
    operand,
    output_positions,
)
from mithril_parallel.xla_model.fusion_model import FusedGraph
from mithril_parallel.xla_model.image_layout import strip_bytes
from mithril_parallel.xla_model.tiling import TILE, image_bytes, row_bytes, stored_bytes

POSITION = 4  # bytes of the position of a maximum
SCATTER_ROWS = 4  # indices of a scatter are stored in tiles of four rows
Lifetime = tuple[int, int, int]  # first and last step, and bytes


def copies(fused: FusedGraph, sharding: GraphSharding, images: frozenset[Value]) -> list[Lifetime]:
    """Return the lifetimes of all layout copies; ``images`` already have the layout of convolutions."""
    nodes = [node for node in fused.graph.nodes if is_windowed_product(node)]
    seen = _strip_copies(nodes, fused, sharding) if fused.strips else _image_copies(nodes, fused, sharding, images)
    return [
        *seen,
        *_kernel_copies(nodes, fused, sharding),
        *_im2col_buffers(nodes, fused, sharding),
        *_reshape_copies(fused, sharding),
        *_table_copies(fused, sharding),
        *_scatter_operands(fused),
        *_repeated_cotangents(fused, sharding),
    ]


def _strip_copies(nodes: list[Node], fused: FusedGraph, sharding: GraphSharding) -> Iterator[Lifetime]:
    """Yield the copies of images in strips with margins, live from the convolution to the kernel gradients."""
    first: dict[Value, int] = {}
    for node in nodes:
        x = node.operands[0]
        if x is not None and x in fused.strips and not is_image_gradient(node) and prod(kernel_size(node)) > 1:
            first.setdefault(x, fused.step[node])
    for x, step in first.items():
        yield step, len(fused.graph.nodes), strip_bytes(sharding.local(x), x.dtype.itemsize)


def _image_copies(
    nodes: list[Node], fused: FusedGraph, sharding: GraphSharding, images: frozenset[Value]
) -> Iterator[Lifetime]:
    """Yield one copy of each image for all convolutions that read it."""
    readers: dict[Value, list[int]] = {}
    for node in nodes:
        v = node.operands[0]
        if v is not None and v not in images:
            readers.setdefault(v, []).append(fused.step[node])
    for v, steps in readers.items():
        yield min(steps), max(steps), image_bytes(sharding.local(v), v.dtype.itemsize)


def _kernel_copies(nodes: list[Node], fused: FusedGraph, sharding: GraphSharding) -> Iterator[Lifetime]:
    """Yield the copies of kernels with swapped axes, which are made first because they depend on nothing."""
    last: dict[tuple[Value, Op], int] = {}
    for node in nodes:
        v = node.operands[1]
        if v is not None and v in fused.graph.input_of and (is_image_gradient(node) or uses_im2col(node)):
            last[v, node.op] = fused.step[node]
    for (v, _), step in last.items():
        yield 0, step, stored_bytes(sharding.local(v), v.dtype.itemsize, True)


def _im2col_buffers(nodes: list[Node], fused: FusedGraph, sharding: GraphSharding) -> Iterator[Lifetime]:
    """Yield the im2col buffers, which the convolution and its kernel gradient share."""
    readers: dict[Value, list[int]] = {}
    size: dict[Value, int] = {}
    for node in nodes:
        x = node.operands[0]
        if x is not None and not is_image_gradient(node) and uses_im2col(node):
            readers.setdefault(x, []).append(fused.step[node])
            n, channels, *_ = sharding.local(x)
            size[x] = stored_bytes(
                (n, prod(output_positions(node)), channels * prod(kernel_size(node))), x.dtype.itemsize, True
            )
    for x, steps in readers.items():
        yield min(steps), max(steps), size[x]


def _reshape_copies(fused: FusedGraph, sharding: GraphSharding) -> Iterator[Lifetime]:
    """Yield the copies of reshapes that change the number of rows and leave tiles partly filled."""
    for node in fused.graph.nodes:
        if node.op is not ops.reshape:
            continue
        old_shape, new_shape = sharding.local(operand(node, 0))[-2:], sharding.local(node.result)[-2:]
        if (
            len(old_shape) == len(new_shape) == 2
            and old_shape[0] != new_shape[0]
            and (old_shape[0] % TILE[0] or new_shape[0] % TILE[0])
        ):
            step = fused.step[node]
            yield step, step, stored_bytes(sharding.local(node.result), node.result.dtype.itemsize, True)


def reads_rows(node: Node | None) -> bool:
    """Whether a node looks up rows of a table: they are stored consecutively, even if they are narrow."""
    if node is None or node.op is not ops.take or node.attributes["axis"] != 0:
        return False
    return operand(node, 0).ndim == 2 and node.result.ndim > 1


def _table_copies(fused: FusedGraph, sharding: GraphSharding) -> Iterator[Lifetime]:
    """Yield the copies of tables with narrow rows, which are updated in that layout, too."""
    for node in fused.graph.nodes:
        if reads_rows(node) and (table := operand(node, 0)) in fused.graph.input_of:
            shape, itemsize = sharding.local(table), table.dtype.itemsize
            if (copied := row_bytes(shape, itemsize)) > stored_bytes(shape, itemsize, True):
                yield fused.step[node], len(fused.graph.nodes), copied


def _scatter_operands(fused: FusedGraph) -> Iterator[Lifetime]:
    """Yield the operands of scatters of elements: updates, indices and their bounds, gathered on each device."""
    for node in fused.graph.nodes:
        if node.op is ops.scatter_nd_add and sizes(operand(node, 1))[-1] > 1:
            count = prod(sizes(operand(node, 2)))
            axes = -(-sizes(operand(node, 1))[-1] // SCATTER_ROWS) * SCATTER_ROWS
            step = fused.step[node]
            yield step, step, count * (axes * 4 + 2 * 4 + operand(node, 2).dtype.itemsize)


def _repeated_cotangents(fused: FusedGraph, sharding: GraphSharding) -> Iterator[Lifetime]:
    """Yield the temporaries of the gradients of maximum pools.

    Positions of the maxima and cotangents are stored once for each element of the image, the cotangents in the buffer
    of the result.
    """
    for node in fused.graph.nodes:
        if node.op is ops.max_pool_grad:
            repeated = image_bytes(sharding.local(node.result), POSITION)
            first = fused.step[node]
            kernels = (fused.step[k.node] for k in fused.kernels if node is k.node or node in k.fused)
            yield first, max(kernels, default=first), repeated


def uses_im2col(node: Node) -> bool:
    """Whether a convolution is computed as one product, because its kernel exceeds its image."""
    return any(k > n for n, k in zip(image_size(node), kernel_size(node), strict=True))
