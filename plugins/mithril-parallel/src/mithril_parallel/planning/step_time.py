"""Seconds that one step takes on a target: each kernel the longer of its arithmetic and its memory traffic."""

from __future__ import annotations

from dataclasses import dataclass
from math import log2, prod

from mithril.ir import Node, Value, is_product, is_windowed_product
from mithril.plugins import HardwareTarget
from mithril_parallel.mesh import Mesh
from mithril_parallel.placing.propagate import Exchange, GraphSharding
from mithril_parallel.planning.memory_estimate import size_function
from mithril_parallel.xla_model.convolutions import is_kernel_gradient
from mithril_parallel.xla_model.fusion_model import FusedGraph, Kernel, walk
from mithril_parallel.xla_model.image_layout import STRIPS, strip

# Where a target does not state what its vector units do: their part of the peak rate of products.
_VECTOR_PART = 1 / 32


@dataclass(frozen=True, slots=True)
class Work:
    """Of one device in one step."""

    flops: float
    traffic: int  # bytes to and from memory
    exchanged: int  # bytes that collectives carry
    compute_seconds: float
    exchange_seconds: float

    @property
    def seconds(self) -> float:
        """Nothing is assumed to overlap: an upper bound for a good schedule."""
        return self.compute_seconds + self.exchange_seconds


def estimate_work(fused: FusedGraph, sharding: GraphSharding, target: HardwareTarget) -> Work:
    """Sum over kernels and exchanges."""
    size = size_function(fused, sharding, tiled=target.family == "tpu")
    flops, traffic, seconds = 0.0, 0, 0.0
    for kernel in fused.kernels:
        products, rest = _flops(kernel, sharding, fused.strips)
        nbytes = sum(size(v) for v in (*kernel.reads, *kernel.node.results))
        nbytes = nbytes * _body_reads(kernel.node)
        flops += products + rest
        traffic += nbytes
        seconds += _kernel_seconds(kernel.node.results, products, rest, nbytes, target)
    exchanges = [_exchange_seconds(e, sharding.mesh, target) for e in sharding.exchanges]
    carried = sum(e.bytes * e.times for e in sharding.exchanges)
    return Work(flops, traffic, carried, seconds, sum(exchanges))


def _body_reads(node: Node) -> int:
    """A loop reads its operands once, but its body moves its own values at every step; half of them stay near."""
    body_nodes = sum(1 for region in node.regions for _ in region.nodes)
    return max(1, body_nodes // 2) if node.regions else 1


def _flops(kernel: Kernel, sharding: GraphSharding, strips: frozenset[Value]) -> tuple[float, float]:
    """Operations of one device: in products, and otherwise."""
    counts = [0.0, 0.0]
    for node in (*kernel.fused, kernel.node):

        def count(inner: Node, times: int) -> None:
            share = _device_share(inner, sharding) * _margin_factor(inner, sharding, strips)
            types = [None if v is None else v.type for v in inner.operands]
            op_flops = inner.op.flops(types, [v.type for v in inner.results], inner.attributes)
            if isinstance(op_flops, (int, float)):
                counts[0 if is_product(inner) else 1] += float(op_flops) * times * share

        walk(node, count)
    return counts[0], counts[1]


def _margin_factor(node: Node, sharding: GraphSharding, strips: frozenset[Value]) -> float:
    """By how much images in strips are wider than without margins, which are computed as well."""
    image = node.operands[1] if is_kernel_gradient(node) else node.result if len(node.results) == 1 else None
    if not is_windowed_product(node) or image not in strips:
        return 1.0
    width = sharding.local(image)[-1]
    return strip(width) * STRIPS / width


def _device_share(node: Node, sharding: GraphSharding) -> float:
    """The part of a node's work that one device does: every mesh axis it is split along divides it."""
    node_sharding = sharding.op_sharding(node)
    axes = {a for split in node_sharding.result_splits for a in split if a is not None} | node_sharding.sums
    return 1 / prod(sharding.mesh.size(a) for a in axes) if axes else 1.0


def _kernel_seconds(
    results: tuple[Value, ...], products: float, rest: float, nbytes: int, target: HardwareTarget
) -> float:
    costs = target.costs
    rate = _rate(results, target)
    arithmetic = products / (rate * costs.get("efficiency", 0.7)) + rest / (
        costs.get("vector_flops") or max(target.peak_flops.values(), default=1e12) * _VECTOR_PART
    )
    memory = nbytes / target.bandwidth if target.bandwidth else 0.0
    return max(arithmetic, memory) + costs.get("launch", 0.0)


def _rate(results: tuple[Value, ...], target: HardwareTarget) -> float:
    """Operations per second in the dtype of the results; one the target lacks is computed in float32."""
    rates = target.peak_flops
    for v in results:
        if v.dtype.name in rates:
            return rates[v.dtype.name]
    return rates.get("float32") or max(rates.values(), default=1e12)


def _exchange_seconds(e: Exchange, mesh: Mesh, target: HardwareTarget) -> float:
    """In a ring: every device passes on all parts but one, and a sum goes round twice."""
    n = mesh.size(e.axis)
    if n == 1:
        return 0.0
    rounds = {"all-reduce": 2.0, "all-to-all": 0.5}.get(e.kind, 1.0)
    link = target.costs.get("interconnect") or target.bandwidth or 1e10
    once = rounds * (n - 1) / n * e.bytes / link + rounds * log2(n) * target.costs.get("hop", 1e-6)
    return once * e.times
