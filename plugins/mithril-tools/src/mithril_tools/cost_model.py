"""Cost model: predicts the run time of a graph on a backend from measured operations.

Calibration (``calibrate.py``) provides the seconds of single operations, and the fraction of these that remains inside
a model, where operations are fused or overlap.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from mithril.backend import nbytes
from mithril.compiler import columns, unknown_flops
from mithril.graph import (
    Graph,
    InputError,
    Node,
    attributes_key,
    counted_flops,
    flops,
    is_product,
    is_view,
    operand_types,
    operation,
    sample_nodes,
)
from mithril.ops import scan_op

CLASSES = ("product", "reduction", "elementwise", "move", "loop")
CALL, SMALLEST, BEYOND = 0, slice(1, 1 + len(CLASSES)), slice(1 + len(CLASSES), None)
PLAIN = (0.0, *(1.0,) * (2 * len(CLASSES)))  # coefficients under which operations cost the same inside a model as alone
NEAREST = 4  # samples that an estimate interpolates
OTHER_ATTRIBUTES = 2.0  # distance, in doublings of size, between samples with different attributes or dtypes


@dataclass(frozen=True, slots=True)
class Sample:
    """A measurement of one separate operation."""

    op: str
    kind: str  # attributes and dtypes
    size: tuple[float, ...]  # logarithms to base 2
    seconds: float


@dataclass(frozen=True)
class Estimate:
    """Predicted seconds of a call, the seconds of each layer, and ``unknown``: operations without any sample.

    ``unknown_flops`` are operations of which nothing says their number: they count one per element.
    """

    seconds: float
    layers: Mapping[str, float]
    flops: int
    bytes: int
    unknown: tuple[str, ...] = ()
    unknown_flops: tuple[str, ...] = ()

    def __str__(self) -> str:
        total = sum(self.layers.values()) or 1.0
        rows = [
            [layer, f"{1e3 * s:.3f}", f"{100 * s / total:.1f}%"]
            for layer, s in sorted(self.layers.items(), key=lambda row: -row[1])
        ]
        lines = [*columns(["layer", "ms", "share"], rows), f"estimated {1e3 * self.seconds:.3f} ms"]
        if self.unknown:
            lines.append(f"no samples, estimated by bytes moved: {', '.join(self.unknown)}")
        lines += unknown_flops(self.unknown_flops)
        return "\n".join(lines)


@dataclass
class CostModel:
    """Samples by operation, and coefficients that combine them into the time of a call.

    The coefficients are the minimal seconds of a call and, for each class of operations, two fractions that remain
    inside a model: of the time of the smallest operation of a kind, and of the time of larger ones beyond it.
    """

    samples: Sequence[Sample]
    coefficients: Sequence[float] = PLAIN
    relative_error: float = float("nan")  # 90th percentile of the relative error on the calibration models

    @property
    def flops_per_second(self) -> float:
        """The highest measured rate of products."""
        rates = [2 ** s.size[0] / s.seconds for s in self.samples if _can_be(s.op, is_product)]
        return max(rates, default=0.0)

    @property
    def bytes_per_second(self) -> float:
        """The highest measured rate of other operations, in bytes read and written."""
        rates = [
            2 ** s.size[1] / s.seconds
            for s in self.samples
            if not _can_be(s.op, is_product) and not _can_be(s.op, is_view)
        ]
        return max(rates, default=0.0)

    @cached_property
    def _by_op(self) -> dict[str, tuple[list[Sample], np.ndarray[Any, Any], float]]:
        groups: dict[str, list[Sample]] = {}
        for sample in self.samples:
            groups.setdefault(sample.op, []).append(sample)
        return {
            op: (group, np.array([s.size for s in group]), min(s.seconds for s in group))
            for op, group in groups.items()
        }

    @cached_property
    def _seconds_per_byte(self) -> float:
        """Median cost of data movement, used for operations without samples."""
        rates = [s.seconds / 2 ** s.size[1] for s in self.samples if s.size[1] > 16]
        return float(np.median(rates)) if rates else 1e-9

    def op_seconds(self, node: Node) -> float:
        """Return the seconds of a static node that runs by itself, from its nearest samples."""
        entry = self._by_op.get(node.op.name)
        if entry is None:
            return self.smallest + 2 ** logarithms(node)[1] * self._seconds_per_byte
        group, sizes, shortest = entry
        size, kind = np.array(logarithms(node)), kind_of(node)
        distance = np.abs(sizes - size).sum(axis=1) + [OTHER_ATTRIBUTES * (s.kind != kind) for s in group]
        nearest = np.argsort(distance, kind="stable")[:NEAREST]
        # 0.05 keeps an exact match finite, with a weight of 400: it decides unless several match.
        weights = (distance[nearest] + 0.05) ** -2
        scaled = [_scaled(group[k], size, shortest) for k in nearest]
        # Times differ by factors, not by seconds: the average is geometric.
        return float(np.exp(np.average(np.log(scaled), weights=weights)))

    @cached_property
    def smallest(self) -> float:
        """The seconds of the fastest sample."""
        return min((s.seconds for s in self.samples), default=1e-6)

    def terms(self, graph: Graph) -> np.ndarray[Any, Any]:
        """Return the feature vector of a static graph, to be multiplied by the coefficients."""
        out = sum((self._terms(node) for node in costly_nodes(graph.nodes)), np.zeros(len(PLAIN)))
        out[CALL] = 1.0
        return out

    def _terms(self, node: Node) -> np.ndarray[Any, Any]:
        seconds = self.op_seconds(node)
        entry = self._by_op.get(node.op.name)
        shortest = min(entry[2] if entry is not None and not node.regions else 0.0, seconds)
        out, which = np.zeros(len(PLAIN)), CLASSES.index(class_of(node))
        out[SMALLEST][which], out[BEYOND][which] = shortest, seconds - shortest
        return out

    def estimate(self, graph: Graph) -> Estimate:
        """Estimate a call of a program with a static graph, as the backend runs it."""
        unknown_sizes = [i.name for i in graph.inputs if not i.type.is_static]
        if unknown_sizes:
            raise InputError(
                f"cannot estimate the time: the size of input '{unknown_sizes[0]}' is unknown",
                hint="pass arrays or shapes: ml.estimate(compiled, {...})",
            )
        layers: dict[str, float] = {}
        flops = bytes_moved = 0
        unknown: dict[str, None] = {}
        uncounted: set[str] = set()
        weights = np.asarray(self.coefficients)
        for node in costly_nodes(graph.nodes):
            path = node.origin.path or "(model)"
            layers[path] = layers.get(path, 0.0) + float(weights @ self._terms(node))
            sizes = size_of(node)
            flops, bytes_moved = flops + sizes[0], bytes_moved + sizes[1]
            if node.op.name not in self._by_op:
                unknown[node.op.name] = None
            uncounted |= uncounted_operations(node)
        seconds = float(weights[CALL]) + sum(layers.values())
        return Estimate(seconds, layers, flops, bytes_moved, tuple(unknown), tuple(sorted(uncounted)))


def uncounted_operations(node: Node) -> set[str]:
    """Return the operations of a node, and of its regions, of which nothing says their flops."""
    inner = (uncounted_operations(n) for region in node.regions for n in region.nodes)
    return set(counted_flops(node)[1]).union(*inner)


def costly_nodes(nodes: Iterable[Node]) -> Iterable[Node]:
    """Return the nodes that cost time: all but constants."""
    return (n for n in nodes if not n.is_constant)


@lru_cache(maxsize=4096)
def _can_be(name: str, holds: Callable[[Node], bool]) -> bool:
    """Whether a predicate holds for an operation on one of its samples."""
    return any(holds(node) for node in sample_nodes(operation(name)))


def class_of(node: Node) -> str:
    if node.regions:
        return "loop"
    if node.op.elementwise:
        return "elementwise"
    if is_product(node):
        return "product"
    return "reduction" if size_of(node)[0] and not is_view(node) else "move"


def size_of(node: Node) -> tuple[int, int, int]:
    """Return floating-point operations, bytes in and out, bytes out; for a loop, the sums over its iterations."""
    if node.regions:
        inner = np.array([size_of(n) for region in node.regions for n in costly_nodes(region.nodes)] or [(0, 0, 0)])
        operations, bytes_moved, out = (
            int(trip_count(node) * total) // len(node.regions) for total in inner.sum(axis=0)
        )
        return operations, bytes_moved, out
    out = sum(nbytes(v.type) for v in node.results)
    return int(flops(node)), out + sum(nbytes(t) for t in operand_types(node) if t is not None), out


def logarithms(node: Node) -> tuple[float, ...]:
    """Return the size vector of samples: log2 of flops, bytes, bytes out, and half that of the innermost axis.

    For a loop, the iterations take the place of the innermost axis.
    """
    last = trip_count(node) if node.regions else next((int(v.type.shape[-1]) for v in node.results if v.type.shape), 1)
    return (*(math.log2(1 + n) for n in size_of(node)), 0.5 * math.log2(1 + last))


def kind_of(node: Node) -> str:
    """Return a key of attributes, dtypes and ranks; for a loop, the operations of its body."""
    types = ",".join("-" if v is None else f"{v.type.dtype.name}{v.type.rank}" for v in node.operands)
    inner = ",".join(sorted({n.op.name for region in node.regions for n in region.nodes}))
    return f"{types} {inner or attributes_key(node.attributes)}"


def _scaled(sample: Sample, size: np.ndarray[Any, Any], shortest: float) -> float:
    """Scale a sample's time to another size: its part above the fastest sample grows with the flops, or the bytes."""
    axis = 0 if sample.size[0] > 0 and size[0] > 0 else 1
    floor = 0.8 * shortest
    return float(floor + (sample.seconds - floor) * 2.0 ** (size[axis] - sample.size[axis]))


def trip_count(node: Node) -> int:
    """Return the number of iterations of a loop; 1 if it is dynamic."""
    return int(node.attributes["length"]) if node.op is scan_op else 1
