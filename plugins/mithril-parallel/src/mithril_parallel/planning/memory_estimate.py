"""Memory of a program on one device: arguments, results, and the peak of the live temporaries.

Three properties of XLA determine the figures: arguments and results keep their buffers for the whole run, a result
aliased to an argument counts once, and the all-reduces of gradients over ``data`` are combined, up to a size, so that
until then every gradient exists twice; gradients of sharded parameters are scattered during the next kernel, and their
gathers start during the previous one. TPUs store two axes of an array in tiles.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod

from mithril.graph import Node, Output, Value, is_product, is_unchanged, is_windowed_product
from mithril_parallel.mesh import DATA
from mithril_parallel.placing.propagate import GraphSharding
from mithril_parallel.xla_model.fusion_model import FusedGraph
from mithril_parallel.xla_model.image_layout import images, strip_bytes
from mithril_parallel.xla_model.layout_copies import copies, reads_rows
from mithril_parallel.xla_model.tiling import TILE, image_bytes, row_bytes, stored_bytes, tiled_bytes

COMBINED = 120 << 20  # bytes of the gradients that XLA reduces in one collective, at most


# The TPU compiler's memory beyond the arguments, as a multiple of the estimate: the smallest and the largest of the
# models in benchmarks/bench_tpu.py, with a margin.
USUAL, FULLY_SHARDED = (0.5, 1.6), (0.5, 1.8)


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes on one device; ``peak`` is the largest sum of buffers that are live at the same time.

    ``error`` are the factors between which the compiler's memory beyond the arguments is expected, ``slots`` the bytes
    of the optimizer's values among the arguments.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    error: tuple[float, float] = USUAL
    slots: int = 0

    @property
    def peak(self) -> int:
        return self.arguments + self.outputs - self.aliased + self.temporaries

    @property
    def interval(self) -> tuple[int, int]:
        """The bytes between which the compiler's peak is expected."""
        beyond = self.peak - self.arguments
        low, high = self.error
        return self.arguments + int(beyond * low), self.arguments + int(beyond * high)


def estimate_memory(
    fused: FusedGraph, sharding: GraphSharding, *, tiled: bool, updates: bool = False, slots: int = 0
) -> MemoryEstimate:
    """Estimate the memory of a fused graph on a mesh.

    With ``updates`` gradients become new parameters in the buffers of the old. ``slots`` is the number of values that
    the optimizer keeps per parameter; their buffers are reused, too.
    """
    graph = fused.graph
    size = size_function(fused, sharding, tiled=tiled)
    parameters = sum(size(i.value) for i in graph.with_role("param"))
    arguments = sum(size(i.value) for i in graph.arguments) + slots * parameters
    results = {r.value: r for r in graph.results}
    outputs = sum(size(v) for v in results) + slots * parameters
    gradients = sum(size(v) for v, r in results.items() if r.role == "gradient")
    state = sum(size(v) for v, r in results.items() if r.role == "state")
    aliased = (gradients + slots * parameters if updates else 0) + (state if updates else 0)
    lifetimes = _gathered_lifetimes(fused, sharding) + (copies(fused, sharding, images(graph)) if tiled else [])
    error = FULLY_SHARDED if sharding.stored else USUAL
    temporaries = _temporaries(fused, sharding, results, size, lifetimes)
    return MemoryEstimate(arguments, outputs, aliased, temporaries, error, slots * parameters)


def size_function(fused: FusedGraph, sharding: GraphSharding, *, tiled: bool) -> Callable[[Value], int]:
    """Return a function from a value to the bytes of one device's part, in the layout that XLA stores."""
    image_values = images(fused.graph) if tiled else frozenset()

    def size(v: Value) -> int:
        # A TPU computes elements of 16 bits in 32 and rounds only where they are stored for products.
        itemsize = 4 if tiled and v in fused.upcast else v.dtype.itemsize
        if v in fused.strips:
            return strip_bytes(sharding.local(v), itemsize)
        if tiled and reads_rows(fused.graph.producers.get(v)):
            return row_bytes(sharding.local(v), itemsize)
        if v in image_values:
            return image_bytes(sharding.local(v), itemsize)
        if tiled and _is_attention_head_product(fused.graph.producers.get(v), sharding.local(v)):
            *heads, rows, columns = sharding.local(v)
            return prod(heads) * tiled_bytes(rows, columns, itemsize)
        return stored_bytes(sharding.local(v), itemsize, tiled)

    return size


def _is_attention_head_product(producer: Node | None, shape: tuple[int, ...]) -> bool:
    """Whether a value is a product over attention heads whose rows fill tiles: its few columns then stay minor."""
    if producer is None or len(shape) < 4 or shape[-2] % TILE[1]:
        return False
    return is_product(producer) and not is_windowed_product(producer)


def _gathered_lifetimes(fused: FusedGraph, sharding: GraphSharding) -> list[tuple[int, int, int]]:
    """Return (first step, last step, bytes) of gathered values, up to their next gather or last use by a product."""
    gathers_by_root: dict[Value, dict[int, int]] = {}
    for e in sharding.exchanges:
        root = e.gathered_value
        while root is not None and (producer := fused.graph.producers.get(root)) is not None and is_unchanged(producer):
            root = producer.operands[0]
        if root is not None and e.node in fused.step:
            gathers_by_root.setdefault(root, {})[fused.step[e.node]] = e.bytes
    lifetimes = []
    kernel_steps = [fused.step[k.node] for k in fused.kernels]
    runs = {node: fused.step[k.node] for k in fused.kernels for node in (*k.fused, k.node)}
    for root, gathers in gathers_by_root.items():
        starts = sorted(gathers)
        # Pointwise operations work on the parts of computed values.
        reads = [r for r in _readers(root, fused) if root in fused.graph.input_of or is_product(r)]
        for start, end in zip(starts, [*starts[1:], len(fused.graph.nodes) + 1], strict=True):
            last = max((runs.get(r, fused.step[r]) for r in reads if start <= fused.step[r] < end), default=start)
            early = bisect_left(kernel_steps, start) - 1  # the gather overlaps the previous kernel
            lifetimes.append((kernel_steps[early] if early >= 0 else 0, last, gathers[start]))
    return lifetimes


def _readers(root: Value, fused: FusedGraph) -> Iterator[Node]:
    """Yield the nodes that read a value, directly or transposed."""
    pending = list(fused.graph.users.get(root, ()))
    while pending:
        node = pending.pop()
        if is_unchanged(node):
            pending += fused.graph.users.get(node.result, ())
        else:
            yield node


def _temporaries(
    fused: FusedGraph,
    sharding: GraphSharding,
    results: dict[Value, Output],
    size: Callable[[Value], int],
    lifetimes: list[tuple[int, int, int]],
) -> int:
    gradients = {v: r.of for v, r in results.items() if r.role == "gradient"}
    summed = {v for v, axis in sharding.summed if axis == DATA and v in gradients}
    end = len(fused.graph.nodes)
    split = {i.name for i in fused.graph.with_role("param") if i.value in sharding.stored}
    scattered = {v for v in summed if gradients[v] in split}  # during the next kernel
    widened = {v for v in summed if v.dtype.is_float and v.dtype.bits == 16}
    reduced = _reduction_steps(fused, [v for v in gradients if v in summed and v not in scattered], size)
    change = [0] * (end + 2)
    for k, kernel in enumerate(fused.kernels):
        following = fused.step[fused.kernels[min(k + 1, len(fused.kernels) - 1)].node]
        for v in kernel.node.results:
            # Results have buffers of their own, counted as outputs; gradients to be summed exist twice
            # until then.
            if v in results and v not in summed:
                continue
            nbytes = size(v) * (2 if v in widened else 1)  # reductions over devices use float32
            first = fused.step[kernel.node]
            change[first] += nbytes
            change[(following if v in scattered else reduced.get(v, fused.last[v])) + 1] -= nbytes
    for first, last, copy_bytes in lifetimes:
        change[first] += copy_bytes
        change[last + 1] -= copy_bytes
    peak = current = 0
    for n in change:
        current += n
        peak = max(peak, current)
    return peak


def _reduction_steps(fused: FusedGraph, gradients: list[Value], size: Callable[[Value], int]) -> dict[Value, int]:
    """Return the step after which each gradient has been reduced over devices.

    XLA combines the reductions of consecutive gradients up to a size; the last combination runs at the end.
    """
    steps = sorted((fused.step[fused.graph.producers[v]], k, v) for k, v in enumerate(gradients))
    ends: dict[Value, int] = {}
    group: list[Value] = []
    total = 0
    for step, _, v in steps:
        if group and total + size(v) > COMBINED:
            ends.update(dict.fromkeys(group, step - 1))
            group, total = [], 0
        group.append(v)
        total += size(v)
    ends.update(dict.fromkeys(group, len(fused.graph.nodes)))
    return ends
