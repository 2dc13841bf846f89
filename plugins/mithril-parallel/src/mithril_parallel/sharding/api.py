"""``ml.shard`` and ``ml.placement``: arguments split as the options say, and what each device then runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mithril.ir import Graph
from mithril_parallel.mesh import DATA, Mesh, Split
from mithril_parallel.placing.strategy import choose
from mithril_parallel.sharding.collective_buckets import bucketed
from mithril_parallel.sharding.local_graph import DeviceGraph
from mithril_parallel.sharding.spmd import cut

CHUNK = "chunk"


def shard(
    graph: Graph,
    axes: Mapping[str, int],
    *,
    splits: Mapping[str, int] | None = None,
    fsdp: bool = False,
) -> tuple[DeviceGraph, dict[str, str]]:
    """The part of one device, and what was left whole with the reason.

    ``axes`` are sizes of ``data``, along which batches are split (with ``fsdp`` parameters too), and of ``model``,
    along which weights are; ``splits`` are those of ``tensor_split_dims``. Gradients and new values of parameters and
    state are split like the old.
    """
    sharded, unsplit = parts(graph, axes, splits=splits, fsdp=fsdp)
    return replace(sharded, graph=bucketed(sharded.graph)), unsplit


def parts(
    graph: Graph, axes: Mapping[str, int], *, splits: Mapping[str, int] | None = None, fsdp: bool = False
) -> tuple[DeviceGraph, dict[str, str]]:
    """As ``shard``, with each exchange by itself, where the graph is cut into stages yet."""
    strategy = choose(graph, Mesh(axes), splits, fsdp=fsdp)
    return cut(graph, axes, strategy.splits, outputs=_like_inputs(graph, strategy.splits)), strategy.unsplit


def placement(graph: Graph, axes: Mapping[str, int]) -> tuple[dict[str, Split], dict[str, str]]:
    """Which axis of the mesh divides which axis of an argument, for engines whose compiler does the rest.

    And what was left whole, with the reason.
    """
    strategy = choose(graph, Mesh(axes))
    return strategy.splits, strategy.unsplit


def in_chunks(graph: Graph, chunks: int) -> DeviceGraph:
    """The part of one chunk of the batch, which devices take in turns, with their sums as ``mesh.chunk_sum``."""
    strategy = choose(graph, Mesh({DATA: chunks}), chunked=True)
    names = {
        name: tuple(CHUNK if a == DATA else a for a in split)
        for name, split in strategy.splits.items()
        if any(i.name == name and i.role != "param" for i in graph.inputs)
    }
    return cut(graph, {CHUNK: chunks}, names, sequential_axes=(CHUNK,))


def _like_inputs(graph: Graph, splits: Mapping[str, Split]) -> dict[str, Split]:
    """Splits of the outputs that are gradients or new values of an input."""
    types = {i.name: i.type for i in graph.arguments if i.role != "cotangent"}
    return {
        r.name: splits.get(r.of, (None,) * r.value.ndim)
        for r in graph.results_of("gradient", "state")
        if types.get(r.of) == r.type
    }
