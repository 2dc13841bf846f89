"""Bytes that one device needs for a program: arguments, results, and the most of what is alive in between.

Three habits of XLA make the numbers: arguments and results have their memory for the whole run, a result that takes
over an argument's memory counts once, and the sums of gradients over ``data`` are gathered into one exchange at the
end, so that until then every gradient is there twice. On TPUs two axes of an array are stored in tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from mithril.graph import Graph, Value
from mithril_tpu.placing.layout import DATA
from mithril_tpu.placing.propagate import Placed
from mithril_tpu.planning.fusion import Fused, pointwise

TILE = (8, 128)
ALIGNED = 256  # bytes, where memory is not tiled


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes on one device. ``peak`` is all that must be there at once."""

    arguments: int
    outputs: int
    aliased: int
    temporaries: int

    @property
    def peak(self) -> int:
        return self.arguments + self.outputs - self.aliased + self.temporaries


def needs(fused: Fused, placed: Placed, *, tiled: bool, updates: bool = False, slots: int = 0) -> Needs:
    """Of a fused graph on a mesh. ``updates``: gradients become new parameters in the old ones' memory.

    ``slots`` is how many values an optimizer keeps for each parameter, in the old ones' memory too.
    """
    graph = fused.graph

    images = _images(graph) if tiled else frozenset()

    def size(v: Value) -> int:
        itemsize = 4 if tiled and v in fused.wide else v.dtype.itemsize
        if v in images:
            return image_bytes(placed.local(v), itemsize)
        return stored(placed.local(v), itemsize, tiled)

    parameters = sum(size(i.value) for i in graph.with_role("param"))
    arguments = sum(size(i.value) for i in graph.arguments) + slots * parameters
    results = {v: n for n, v in zip(graph.output_names, graph.outputs, strict=True)}
    outputs = sum(size(v) for v in results) + slots * parameters
    gradients = sum(size(v) for v, name in results.items() if name.startswith("grad/"))
    state = sum(size(v) for v, name in results.items() if name.startswith("state/"))
    aliased = (gradients + slots * parameters if updates else 0) + (state if updates else 0)
    copies = _copies(fused, placed, images) if tiled else []
    alive = copies + _gathered(fused, placed)
    alive += _windows(fused, placed) if tiled else []
    return Needs(arguments, outputs, aliased, _temporaries(fused, placed, results, size, alive))


_HANDED_ON = frozenset({"transpose", "cast", "reshape"})
WINDOWS = 3.25  # values, their numbers, both chosen from, of four bytes, and whether they are the maximum, of one


def _windows(fused: Fused, placed: Placed) -> list[tuple[int, int, int]]:
    """Where the places of maxima are found, all windows of an image lie side by side."""
    return [
        (
            fused.step[node],
            fused.step[node],
            int(prod(node.attributes["kernel"]) * WINDOWS * image_bytes(placed.local(node.result), 4)),
        )
        for node in fused.graph.nodes
        if node.op.name == "max_pool_positions"
    ]


def _gathered(fused: Fused, placed: Placed) -> list[tuple[int, int, int]]:
    """First and last step, and bytes, of parameters split but read whole: gathered at once, kept to the end."""
    found: dict[Value, int] = {}
    for e in placed.exchanges:
        root = e.whole
        while root is not None and (maker := fused.graph.producers.get(root)) is not None:
            root = maker.operands[0] if maker.op.name in _HANDED_ON else None
        if root is not None:
            found[root] = max(found.get(root, 0), e.bytes)
    return [(0, len(fused.graph.nodes), size) for size in found.values()]


def _copies(fused: Fused, placed: Placed, images: frozenset[Value]) -> list[tuple[int, int, int]]:
    """First and last step, and bytes, of images stored otherwise: one copy serves all convolutions that read them."""
    readers: dict[Value, list[int]] = {}
    for node in fused.graph.nodes:
        v = node.operands[0] if node.operands else None
        if v is not None and v not in images and (node.op.name in _CONVOLUTIONS or node.op.name == "conv_weight_grad"):
            readers.setdefault(v, []).append(fused.step[node])
    return [(min(steps), max(steps), image_bytes(placed.local(v), v.dtype.itemsize)) for v, steps in readers.items()]


def _temporaries(
    fused: Fused,
    placed: Placed,
    results: dict[Value, str],
    size: Callable[[Value], int],
    alive: list[tuple[int, int, int]],
) -> int:
    summed = {v for v, axis in placed.summed if axis == DATA and results.get(v, "").startswith("grad/")}
    end = len(fused.graph.nodes)
    widened = {v for v in summed if v.dtype.is_float and v.dtype.bits == 16}
    change = [0] * (end + 2)
    for kernel in fused.kernels:
        for v in kernel.node.results:
            if v in results and v not in summed:
                continue
            there = size(v) * (2 if v in widened else 1)  # sums over devices are made in float32
            change[fused.step[kernel.node]] += there
            change[(end if v in summed else fused.last[v]) + 1] -= there
    for first, last, size_there in alive:
        change[first] += size_there
        change[last + 1] -= size_there
    most = now = 0
    for n in change:
        now += n
        most = max(most, now)
    return most


@lru_cache(maxsize=4096)
def stored(shape: tuple[int, ...], itemsize: int, tiled: bool) -> int:
    """Bytes of an array as it is stored; where it is tiled, with its axes in the order that wastes least."""
    if not tiled:
        return -(-prod(shape) * itemsize // ALIGNED) * ALIGNED
    axes = [n for n in shape if n != 1]
    if 0 in axes:
        return 0
    rows, columns = TILE[0] * max(1, 4 // itemsize), TILE[1]
    if len(axes) < 2:
        n = axes[0] if axes else 1
        return -(-n // columns) * columns * itemsize
    total = prod(axes)
    least = min(
        total // (axes[i] * axes[j]) * _rows(axes[i], rows) * (-(-axes[j] // columns) * columns)
        for i in range(len(axes))
        for j in range(len(axes))
        if i != j
    )
    return least * itemsize


def _rows(n: int, tile: int) -> int:
    """Rows of a tile are stored in eights (of four bytes); of few rows, as many as the next power of two."""
    return 1 << (n - 1).bit_length() if n < tile else -(-n // tile) * tile


_CONVOLUTIONS = frozenset({"conv", "conv_input_grad"})
_POOLS = frozenset({"max_pool", "avg_pool", "max_pool_grad", "avg_pool_grad", "pad", "concat", "slice"})


def _images(graph: Graph) -> frozenset[Value]:
    """Values that convolutions read or make, and what is computed of them point by point."""
    found: set[Value] = set()
    for node in graph.nodes:
        near = node.op.name in _CONVOLUTIONS or (
            (pointwise(node) or node.op.name in _POOLS) and any(v in found for v in node.operands)
        )
        if near:
            found.update(v for v in node.results if v.ndim >= 4)
    return frozenset(found)


def image_bytes(shape: tuple[int, ...], itemsize: int) -> int:
    """Bytes of [N, C, ...] as convolutions want it: N and C are the axes of the tile, in either order."""
    n, c, *places = shape
    rows, columns = TILE[0] * max(1, 4 // itemsize), TILE[1]
    tile = min(_rows(a, rows) * (-(-b // columns) * columns) for a, b in ((n, c), (c, n)))
    return prod(places) * tile * itemsize
