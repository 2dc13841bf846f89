"""``ml.forward_pipeline``: a forward pass as stages and chunks, for engines that differentiate each stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mithril.graph import Graph, OptionError
from mithril_parallel.mesh import CONTEXT, DATA, Mesh, Split
from mithril_parallel.placing.strategy import batch_length
from mithril_parallel.sharding.api import CHUNK
from mithril_parallel.sharding.forward_chunks import ForwardChunks, forward_chunks
from mithril_parallel.sharding.forward_stages import ForwardStage, forward_stages
from mithril_parallel.sharding.local_graph import INDEX
from mithril_parallel.sharding.spmd import SpmdPartitioner


@dataclass(frozen=True)
class ForwardPipeline:
    """The stages of one of ``chunks`` and of the rows of one process, and the operations after all chunks.

    The last stage computes the ends ``objectives``, which have cotangents. ``splits`` are those of the ends over the
    axes of rows; ``partial`` tells over which of them an end is a term of a sum. ``indices`` and ``context_index`` name
    inputs that hold the numbers of the chunk and of the process along ``data`` and ``context``.
    """

    stages: list[ForwardStage]
    chunks: int
    cut: ForwardChunks
    objectives: tuple[str, ...]
    ahead: Graph | None
    splits: Mapping[str, Split]
    partial: Mapping[str, frozenset[str]]
    indices: tuple[str, str] = (INDEX + CHUNK, INDEX + DATA)
    context_index: str = INDEX + CONTEXT


def forward_pipeline(
    graph: Graph,
    objectives: Sequence[str],
    stages: int,
    chunks: int = 1,
    *,
    rows: Mapping[str, int] | None = None,
    splits: Mapping[str, Split] | None = None,
) -> ForwardPipeline:
    """Cut a forward graph into stages and its batch into chunks; ``objectives`` are results that have cotangents.

    If ``chunks`` cannot divide the batch, such as the last one of an epoch, fewer do, of equal sizes.
    Each stage is that of one process; ``rows`` are the numbers of processes that divide the inputs as ``splits`` says,
    along ``data`` and other axes. The ends of the chunks, not the results, have cotangents: see ``ForwardChunks``.
    """
    if chunks < 1:
        raise OptionError(f"pipeline_chunks={chunks} must be at least 1")
    inputs = dict(splits or {})
    mesh = Mesh({axis: n for axis, n in (rows or {}).items() if n > 1})
    chunks = _fitting(graph, chunks, mesh.size(DATA) if any(DATA in s for s in inputs.values()) else 1)
    cut = forward_chunks(graph, objectives, chunks)
    read = {i.name for i in cut.finish.arguments} if cut.finish is not None else set()
    complete = {
        name: (None,) * v.ndim
        for name, v in zip(cut.body.output_names, cut.body.outputs, strict=True)
        if name in read and name not in cut.sums
    }
    body = SpmdPartitioner(cut.body, mesh, frozenset(), differentiated=True).run(inputs, complete, cut.sums)
    ahead = None
    if cut.ahead is not None:
        ahead = SpmdPartitioner(cut.ahead, mesh, frozenset()).run(inputs, {}, cut.sums).graph
    ends = _objectives(cut, objectives)
    return ForwardPipeline(
        forward_stages(body.graph, stages, ends),
        chunks,
        cut,
        ends,
        ahead,
        {name: part.split for name, part in body.outputs.items()},
        {name: part.sums for name, part in body.outputs.items()},
    )


def _objectives(cut: ForwardChunks, results: Sequence[str]) -> tuple[str, ...]:
    """Return the ends that have cotangents."""
    names = [cut.results[name] for name in results if name in cut.results]
    names += cut.seeds.output_names if cut.seeds is not None else ()
    return tuple(dict.fromkeys(names))


def _fitting(graph: Graph, chunks: int, data: int) -> int:
    """Return the largest number of chunks, up to ``chunks``, of which each can be divided over the processes."""
    length = batch_length(graph)
    return max((n for n in range(1, chunks + 1) if length is None or length % (n * data) == 0), default=1)
