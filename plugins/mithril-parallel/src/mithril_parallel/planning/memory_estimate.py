"""Bytes that one device needs for a program: arguments, results, and the most of what is alive in between.

Three habits of XLA make the numbers: arguments and results have their memory for the whole run, a result that takes
over an argument's memory counts once, and the sums of gradients over ``data`` are gathered into one exchange at the
end, so that until then every gradient is there twice; those of parameters in parts are given out as they are made. On
TPUs two axes of an array are stored in tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod

from mithril.ir import Node, Output, Value, is_product, is_unchanged, is_windowed_product
from mithril_parallel.mesh import DATA, base
from mithril_parallel.placing.propagate import Placed
from mithril_parallel.xla_model.fusion_model import Fused
from mithril_parallel.xla_model.image_layout import images, strip_bytes
from mithril_parallel.xla_model.layout_copies import copies
from mithril_parallel.xla_model.tiling import TILE, image_bytes, stored, tiled_bytes


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

    size = sizer(fused, placed, tiled=tiled)
    parameters = sum(size(i.value) for i in graph.with_role("param"))
    arguments = sum(size(i.value) for i in graph.arguments) + slots * parameters
    results = {r.value: r for r in graph.results}
    outputs = sum(size(v) for v in results) + slots * parameters
    gradients = sum(size(v) for v, r in results.items() if r.role == "gradient")
    state = sum(size(v) for v, r in results.items() if r.role == "state")
    aliased = (gradients + slots * parameters if updates else 0) + (state if updates else 0)
    alive = _gathered(fused, placed) + (copies(fused, placed, images(graph)) if tiled else [])
    return Needs(arguments, outputs, aliased, _temporaries(fused, placed, results, size, alive))


def sizer(fused: Fused, placed: Placed, *, tiled: bool) -> Callable[[Value], int]:
    """The bytes of one device's part of a value as it is stored."""
    pictures = images(fused.graph) if tiled else frozenset()

    def size(v: Value) -> int:
        itemsize = 4 if tiled and v in fused.wide else v.dtype.itemsize
        if v in fused.strips:
            return strip_bytes(placed.local(v), itemsize)
        if v in pictures:
            return image_bytes(placed.local(v), itemsize)
        if tiled and _of_heads(fused.graph.producers.get(v), placed.local(v)):
            *heads, rows, columns = placed.local(v)
            return prod(heads) * tiled_bytes(rows, columns, itemsize)
        return stored(placed.local(v), itemsize, tiled)

    return size


def _of_heads(maker: Node | None, shape: tuple[int, ...]) -> bool:
    """Whether a value is a product of attention's heads whose rows fill tiles: it then keeps its few columns."""
    if maker is None or len(shape) < 4 or shape[-2] % TILE[1]:
        return False
    return is_product(maker) and not is_windowed_product(maker)


def _gathered(fused: Fused, placed: Placed) -> list[tuple[int, int, int]]:
    """First and last step, and bytes, of parameters split but read whole: till gathered anew, or read last."""
    found: dict[Value, dict[int, int]] = {}
    for e in placed.exchanges:
        root = e.whole
        while root is not None and (maker := fused.graph.producers.get(root)) is not None:
            root = maker.operands[0] if is_unchanged(maker) else None
        if root is not None and e.node in fused.step:
            found.setdefault(root, {})[fused.step[e.node]] = e.bytes
    alive = []
    for root, gathers in found.items():
        starts = sorted(gathers)
        reads = sorted(_read(root, fused))
        for start, end in zip(starts, [*starts[1:], len(fused.graph.nodes) + 1], strict=True):
            alive.append((start, max((r for r in reads if start <= r < end), default=start), gathers[start]))
    return alive


def _read(root: Value, fused: Fused) -> Iterator[int]:
    """The steps at which a value is read, as it is or turned round."""
    pending = list(fused.graph.users.get(root, ()))
    while pending:
        node = pending.pop()
        if is_unchanged(node):
            pending += fused.graph.users.get(node.result, ())
        else:
            yield fused.step[node]


def _temporaries(
    fused: Fused,
    placed: Placed,
    results: dict[Value, Output],
    size: Callable[[Value], int],
    alive: list[tuple[int, int, int]],
) -> int:
    gradients = {v: r.of for v, r in results.items() if r.role == "gradient"}
    summed = {v for v, axis in placed.summed if axis == DATA and v in gradients}
    end = len(fused.graph.nodes)
    split = {i.name for i in fused.graph.with_role("param") if DATA in map(base, filter(None, placed.splits[i.value]))}
    scattered = {v for v in summed if gradients[v] in split}  # as soon as it is made
    widened = {v for v in summed if v.dtype.is_float and v.dtype.bits == 16}
    change = [0] * (end + 2)
    for kernel in fused.kernels:
        for v in kernel.node.results:
            if v in results and v not in summed:
                continue
            there = size(v) * (2 if v in widened else 1)  # sums over devices are made in float32
            first = fused.step[kernel.node]
            change[first] += there
            change[(first if v in scattered else end if v in summed else fused.last[v]) + 1] -= there
    for first, last, size_there in alive:
        change[first] += size_there
        change[last + 1] -= size_there
    most = now = 0
    for n in change:
        now += n
        most = max(most, now)
    return most
