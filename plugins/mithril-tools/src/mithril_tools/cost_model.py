"""How long a graph takes on a backend, told from how long other operations took there.

Two things are known from calibration (``calibrate.py``): seconds of single operations, and how much of that
is left inside a model, where they may be fused, and follow each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from mithril.backend.memory_plan import nbytes
from mithril.base.errors import InputError
from mithril.base.registry import operation
from mithril.base.tables import columns
from mithril.ir import Graph, Node
from mithril.ir.attribute_text import attributes_key
from mithril.ir.traits import is_product, is_view, sample_nodes

CLASSES = ("product", "reduction", "elementwise", "move", "loop")
CALL, SMALLEST, BEYOND = 0, slice(1, 1 + len(CLASSES)), slice(1 + len(CLASSES), None)
PLAIN = (0.0, *(1.0,) * (2 * len(CLASSES)))  # as if inside a model everything took what it takes alone
NEAREST = 4  # samples that an estimate is made from
OTHER_ATTRIBUTES = 2.0  # how far apart, in doublings of size, other attributes or dtypes put two samples


@dataclass(frozen=True, slots=True)
class Sample:
    """One operation by itself."""

    op: str
    kind: str  # attributes and dtypes
    size: tuple[float, ...]  # logarithms to base 2
    seconds: float


@dataclass(frozen=True)
class Estimate:
    """Seconds of a call. ``layers`` has the share of each layer; ``unknown`` the operations nothing was known of."""

    seconds: float
    layers: Mapping[str, float]
    flops: int
    bytes: int
    unknown: tuple[str, ...] = ()

    def __str__(self) -> str:
        whole = sum(self.layers.values()) or 1.0
        rows = [
            [layer, f"{1e3 * s:.3f}", f"{100 * s / whole:.1f}%"]
            for layer, s in sorted(self.layers.items(), key=lambda row: -row[1])
        ]
        lines = [*columns(["layer", "ms", "share"], rows), f"estimated {1e3 * self.seconds:.3f} ms"]
        if self.unknown:
            lines.append(f"taken as moving their bytes, for want of samples: {', '.join(self.unknown)}")
        return "\n".join(lines)


@dataclass
class CostModel:
    """Samples by operation, and coefficients of what a call adds up to.

    These are seconds that a call takes at least; for each class of operations how much is left inside a model of
    what the smallest of a kind takes alone, and of what others take beyond that.
    """

    samples: Sequence[Sample]
    coefficients: Sequence[float] = PLAIN
    apart: float = float("nan")  # nine of ten models it was made from are told no farther off than this, as a share

    @property
    def flops_per_second(self) -> float:
        """The best that was seen of products."""
        rates = [2 ** s.size[0] / s.seconds for s in self.samples if _can_be(s.op, is_product)]
        return max(rates, default=0.0)

    @property
    def bytes_per_second(self) -> float:
        """The best that was seen of anything else, read and written."""
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
        """Of what only moves bytes: for operations without any sample."""
        rates = [s.seconds / 2 ** s.size[1] for s in self.samples if s.size[1] > 16]
        return float(np.median(rates)) if rates else 1e-9

    def alone(self, node: Node) -> float:
        """Seconds of a static node that runs by itself, from the samples most like it."""
        found = self._by_op.get(node.op.name)
        if found is None:
            return self.smallest + 2 ** logarithms(node)[1] * self._seconds_per_byte
        group, sizes, least = found
        own, kind = np.array(logarithms(node)), kind_of(node)
        apart = np.abs(sizes - own).sum(axis=1) + [OTHER_ATTRIBUTES * (s.kind != kind) for s in group]
        chosen = np.argsort(apart, kind="stable")[:NEAREST]
        weights = (apart[chosen] + 0.05) ** -2
        scaled = [_scaled(group[k], own, least) for k in chosen]
        return float(np.exp(np.average(np.log(scaled), weights=weights)))

    @cached_property
    def smallest(self) -> float:
        """Seconds of the least that can be asked for."""
        return min((s.seconds for s in self.samples), default=1e-6)

    def terms(self, graph: Graph) -> np.ndarray[Any, Any]:
        """What the coefficients multiply, for a static graph."""
        out = sum((self._terms(node) for node in worked(graph.nodes)), np.zeros(len(PLAIN)))
        out[CALL] = 1.0
        return out

    def _terms(self, node: Node) -> np.ndarray[Any, Any]:
        alone = self.alone(node)
        found = self._by_op.get(node.op.name)
        least = min(found[2] if found is not None and not node.regions else 0.0, alone)
        out, which = np.zeros(len(PLAIN)), CLASSES.index(class_of(node))
        out[SMALLEST][which], out[BEYOND][which] = least, alone - least
        return out

    def estimate(self, graph: Graph) -> Estimate:
        """A call of a program whose graph, as the backend runs it, is static."""
        unknown_sizes = [i.name for i in graph.inputs if not i.type.is_static]
        if unknown_sizes:
            raise InputError(f"the size of input '{unknown_sizes[0]}' is not known, so its time cannot be estimated")
        layers: dict[str, float] = {}
        flops = moved = 0
        unknown: dict[str, None] = {}
        weights = np.asarray(self.coefficients)
        for node in worked(graph.nodes):
            path = node.origin.path or "(model)"
            layers[path] = layers.get(path, 0.0) + float(weights @ self._terms(node))
            sizes = size_of(node)
            flops, moved = flops + sizes[0], moved + sizes[1]
            if node.op.name not in self._by_op:
                unknown[node.op.name] = None
        return Estimate(float(weights[CALL]) + sum(layers.values()), layers, flops, moved, tuple(unknown))


def worked(nodes: Iterable[Node]) -> Iterable[Node]:
    """Nodes that take any time: numbers written in the graph take none."""
    return (n for n in nodes if n.op.name != "constant")


@lru_cache(maxsize=4096)
def _can_be(name: str, holds: Callable[[Node], bool]) -> bool:
    """Whether something holds for an operation on one of its samples."""
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
    """Floating-point operations, bytes in and out, bytes out; of a loop, all that its body has to do."""
    if node.regions:
        inner = np.array([size_of(n) for region in node.regions for n in worked(region.nodes)] or [(0, 0, 0)])
        flops, moved, out = (int(turns(node) * total) // len(node.regions) for total in inner.sum(axis=0))
        return flops, moved, out
    types = [None if v is None else v.type for v in node.operands]
    rule: Any = node.op.flops
    flops = int(rule(types, [v.type for v in node.results], node.attributes)) if rule is not None else 0
    out = sum(nbytes(v.type) for v in node.results)
    return flops, out + sum(nbytes(t) for t in types if t is not None), out


def logarithms(node: Node) -> tuple[float, ...]:
    """Sizes as samples have them: work, bytes, bytes out, and half the innermost axis, along which vectors run; of a
    loop its turns."""
    last = turns(node) if node.regions else next((int(v.type.shape[-1]) for v in node.results if v.type.shape), 1)
    return (*(math.log2(1 + n) for n in size_of(node)), 0.5 * math.log2(1 + last))


def kind_of(node: Node) -> str:
    """Attributes, dtypes and ranks; of a loop, what its body consists of."""
    types = ",".join("-" if v is None else f"{v.type.dtype.name}{v.type.rank}" for v in node.operands)
    inner = ",".join(sorted({n.op.name for region in node.regions for n in region.nodes}))
    return f"{types} {inner or attributes_key(node.attributes)}"


def _scaled(sample: Sample, own: np.ndarray[Any, Any], least: float) -> float:
    """A sample's time brought to another size: what it takes beyond the smallest grows with the work, or the bytes."""
    axis = 0 if sample.size[0] > 0 and own[0] > 0 else 1
    floor = 0.8 * least
    return float(floor + (sample.seconds - floor) * 2.0 ** (own[axis] - sample.size[axis]))


def turns(node: Node) -> int:
    """How often a body runs: once, where that is only known when it does."""
    return int(node.attributes["length"]) if node.op.name == "scan" else 1
