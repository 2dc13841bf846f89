"""``ml.placement``: splits of arguments chosen by the options; and the graph of one chunk of the batch."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from mithril.graph import Graph
from mithril_parallel.mesh import DATA, Mesh, Split
from mithril_parallel.placing.strategy import choose
from mithril_parallel.sharding.local_graph import DeviceGraph
from mithril_parallel.sharding.spmd import partition_graph

CHUNK = "chunk"


def placement(
    graph: Graph,
    axes: Mapping[str, int],
    *,
    splits: Mapping[str, int] | None = None,
    fsdp: bool = False,
    uneven: bool = False,
    classes: bool = False,
    experts: Collection[str] = (),
) -> tuple[dict[str, Split], dict[str, str]]:
    """Return the splits of the arguments, for engines that partition the graph themselves.

    The second result maps inputs that should be split, but cannot be, to the reason. With ``uneven`` a batch that
    cannot be divided is one of these; otherwise it is an error. With ``classes`` the engine computes losses on parts of
    the classes. The parameters ``experts`` are split over ``data`` along their first axis.
    """
    strategy = choose(graph, Mesh(axes), splits, fsdp=fsdp, uneven=uneven, classes=classes, experts=experts)
    return strategy.splits, strategy.unsplit


def in_chunks(graph: Graph, chunks: int, *, differentiated: bool = False) -> DeviceGraph:
    """Return the graph of one chunk of the batch; sums over the chunks are the operation ``mesh.chunk_sum``.

    ``differentiated`` tells that a framework differentiates it.
    """
    strategy = choose(graph, Mesh({DATA: chunks}), chunked=True)
    names = {
        name: tuple(CHUNK if a == DATA else a for a in split)
        for name, split in strategy.splits.items()
        if any(i.name == name and i.role != "param" for i in graph.inputs)
    }
    return partition_graph(graph, {CHUNK: chunks}, names, sequential_axes=(CHUNK,), differentiated=differentiated)
