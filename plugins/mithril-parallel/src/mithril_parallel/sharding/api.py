"""``ml.shard`` and ``ml.placement``: splits of arguments chosen by the options, and the per-device graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mithril.ir import Graph
from mithril_parallel.mesh import DATA, Mesh, Split
from mithril_parallel.placing.strategy import choose
from mithril_parallel.sharding.collective_buckets import bucketed
from mithril_parallel.sharding.local_graph import DeviceGraph
from mithril_parallel.sharding.spmd import partition_graph

CHUNK = "chunk"


def shard(
    graph: Graph,
    axes: Mapping[str, int],
    *,
    splits: Mapping[str, int] | None = None,
    fsdp: bool = False,
) -> tuple[DeviceGraph, dict[str, str]]:
    """Return the graph of one device, and the reason for each input that is replicated although it should be split.

    ``axes`` are the sizes of ``data``, along which batches are split (with ``fsdp`` parameters, too), and of
    ``model``, along which weights are split; ``splits`` has the form of ``tensor_split_dims``. Gradients and new
    values of parameters and state are split like the old values.
    """
    sharded, unsplit = shard_unbucketed(graph, axes, splits=splits, fsdp=fsdp)
    return replace(sharded, graph=bucketed(sharded.graph)), unsplit


def shard_unbucketed(
    graph: Graph, axes: Mapping[str, int], *, splits: Mapping[str, int] | None = None, fsdp: bool = False
) -> tuple[DeviceGraph, dict[str, str]]:
    """Return the result of ``shard`` without buckets: for graphs that are still to be cut into stages."""
    strategy = choose(graph, Mesh(axes), splits, fsdp=fsdp, uneven=True)
    return partition_graph(graph, axes, strategy.splits, outputs=_like_inputs(graph, strategy.splits)), strategy.unsplit


def placement(
    graph: Graph,
    axes: Mapping[str, int],
    *,
    splits: Mapping[str, int] | None = None,
    fsdp: bool = False,
    uneven: bool = False,
) -> tuple[dict[str, Split], dict[str, str]]:
    """Return the splits of the arguments, for engines that partition the graph themselves.

    The second result maps inputs that should be split, but cannot be, to the reason. With ``uneven`` a batch that
    cannot be divided is one of these; otherwise it is an error.
    """
    strategy = choose(graph, Mesh(axes), splits, fsdp=fsdp, uneven=uneven)
    return strategy.splits, strategy.unsplit


def in_chunks(graph: Graph, chunks: int) -> DeviceGraph:
    """Return the graph of one chunk of the batch; sums over the chunks are the operation ``mesh.chunk_sum``."""
    strategy = choose(graph, Mesh({DATA: chunks}), chunked=True)
    names = {
        name: tuple(CHUNK if a == DATA else a for a in split)
        for name, split in strategy.splits.items()
        if any(i.name == name and i.role != "param" for i in graph.inputs)
    }
    return partition_graph(graph, {CHUNK: chunks}, names, sequential_axes=(CHUNK,))


def _like_inputs(graph: Graph, splits: Mapping[str, Split]) -> dict[str, Split]:
    """Return the splits of the outputs that are gradients or new values of an input."""
    types = {i.name: i.type for i in graph.arguments if i.role != "cotangent"}
    return {
        r.name: splits.get(r.of, (None,) * r.value.ndim)
        for r in graph.results_of("gradient", "state")
        if types.get(r.of) == r.type
    }
