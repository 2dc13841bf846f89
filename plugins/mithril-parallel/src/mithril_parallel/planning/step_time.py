"""Roofline estimate of one step on a target: each kernel takes the longer of its arithmetic and its memory traffic."""

from __future__ import annotations

from dataclasses import dataclass
from math import log2, prod

from mithril.graph import Graph, Node, Value, counted_flops, flops, is_product, is_windowed_product, numel
from mithril.plugins import HardwareTarget
from mithril_parallel.mesh import Mesh
from mithril_parallel.placing.propagate import Collective, GraphSharding
from mithril_parallel.planning.memory_estimate import size_function
from mithril_parallel.xla_model.convolutions import is_kernel_gradient
from mithril_parallel.xla_model.fusion_model import FusedGraph, Kernel, walk
from mithril_parallel.xla_model.image_layout import STRIPS, strip

# Rate of vector units as a fraction of the peak matmul rate, for targets that do not state it.
_VECTOR_FRACTION = 1 / 32


@dataclass(frozen=True, slots=True)
class Work:
    """The work of one device in one step."""

    flops: float
    traffic: int  # bytes to and from memory
    exchanged: int  # bytes that collectives carry
    compute_seconds: float
    exchange_seconds: float

    @property
    def seconds(self) -> float:
        """Time of one step without overlap of computation and communication: an upper bound."""
        return self.compute_seconds + self.exchange_seconds


def estimate_work(fused: FusedGraph, sharding: GraphSharding, target: HardwareTarget) -> Work:
    """Sum the work of all kernels and collectives."""
    size = size_function(fused, sharding, tiled=target.family == "tpu")
    flops, traffic, seconds = 0.0, 0, 0.0
    for kernel in fused.kernels:
        products, rest = _flops(kernel, sharding, fused.strips, target)
        nbytes = sum(size(v) for v in (*kernel.reads, *kernel.node.results))
        nbytes = nbytes * _body_reads(kernel.node)
        flops += products + rest
        traffic += nbytes
        seconds += _kernel_seconds(kernel.node.results, products, rest, nbytes, target)
    exchanges = [_exchange_seconds(e, sharding.mesh, target) for e in sharding.exchanges]
    carried = sum(e.bytes * e.times for e in sharding.exchanges)
    return Work(flops, traffic, carried, seconds, sum(exchanges))


def _body_reads(node: Node) -> int:
    """Return the factor on a loop's memory traffic: its body accesses its own values, of which half stay cached."""
    body_nodes = sum(1 for region in node.regions for _ in region.nodes)
    return max(1, body_nodes // 2) if node.regions else 1


def _flops(
    kernel: Kernel, sharding: GraphSharding, strips: frozenset[Value], target: HardwareTarget
) -> tuple[float, float]:
    """Return the operations of one device in products, and all others."""
    counts = [0.0, 0.0]
    for node in (*kernel.fused, kernel.node):

        def count(inner: Node, times: int) -> None:
            share = _device_share(inner, sharding) * _margin_factor(inner, sharding, strips)
            cost = target.instructions.get(inner.op.name)
            op_flops = flops(inner) if cost is None else sum(numel(v.shape) for v in inner.results)
            if isinstance(op_flops, (int, float)):
                work = float(op_flops) if cost is None else float(op_flops) * cost
                counts[0 if is_product(inner) else 1] += work * times * share

        walk(node, count)
    return counts[0], counts[1]


def unknown_flops(graph: Graph, target: HardwareTarget) -> tuple[str, ...]:
    """Return the operations of which neither a declaration nor the target says their flops."""
    names: set[str] = set()
    for node in graph.nodes:
        walk(node, lambda inner, _: names.update(counted_flops(inner)[1]))
    return tuple(sorted(names - target.instructions.keys()))


def _margin_factor(node: Node, sharding: GraphSharding, strips: frozenset[Value]) -> float:
    """Return the factor on a convolution's work due to the margins of strips, which are computed as well."""
    image = node.operands[1] if is_kernel_gradient(node) else node.result if len(node.results) == 1 else None
    if not is_windowed_product(node) or image not in strips:
        return 1.0
    width = sharding.local(image)[-1]
    return strip(width) * STRIPS / width


def _device_share(node: Node, sharding: GraphSharding) -> float:
    """Return the fraction of a node's work on one device: every mesh axis that splits the node divides its work."""
    node_sharding = sharding.op_sharding(node)
    axes = {a for split in node_sharding.result_splits for a in split if a is not None} | node_sharding.sums
    return 1 / prod(sharding.mesh.size(a) for a in axes) if axes else 1.0


def _kernel_seconds(
    results: tuple[Value, ...], products: float, rest: float, nbytes: int, target: HardwareTarget
) -> float:
    costs = target.costs
    rate = _rate(results, target)
    # 0.7 of the peak, for targets that do not state the share of it that products reach.
    arithmetic = products / (rate * costs.get("efficiency", 0.7)) + rest / (
        costs.get("vector_flops") or max(target.peak_flops.values(), default=1e12) * _VECTOR_FRACTION
    )
    memory = nbytes / target.bandwidth if target.bandwidth else 0.0
    return max(arithmetic, memory) + costs.get("launch", 0.0)


def _rate(results: tuple[Value, ...], target: HardwareTarget) -> float:
    """Return the operations per second in the dtype of the results, or in float32 if the target lacks that dtype."""
    rates = target.peak_flops
    for v in results:
        if v.dtype.name in rates:
            return rates[v.dtype.name]
    return rates.get("float32") or max(rates.values(), default=1e12)


def _exchange_seconds(e: Collective, mesh: Mesh, target: HardwareTarget) -> float:
    """Return the time of a ring collective: n - 1 of n parts pass each device, in an all-reduce twice."""
    n = mesh.size(e.axis)
    if n == 1:
        return 0.0
    rounds = {"all-reduce": 2.0, "all-to-all": 0.5}.get(e.kind, 1.0)
    link = target.costs.get("interconnect") or target.bandwidth or 1e10
    once = rounds * (n - 1) / n * e.bytes / link + rounds * log2(n) * target.costs.get("hop", 1e-6)
    return once * e.times
