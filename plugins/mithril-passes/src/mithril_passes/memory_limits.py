"""``memory_planning`` and ``max_memory_gb``: how much a program needs, said before it runs."""

from __future__ import annotations

from collections.abc import Mapping

from mithril import Graph, MemoryLimitError, MithrilError
from mithril.backend.memory_plan import check_limit, human, nbytes, parse_bytes, plan
from mithril.base.dims import numel, substitute, symbols
from mithril.passes.manager import PassContext
from mithril_passes.checkpointing import gradient_checkpointing, halves


def memory_planning(graph: Graph, context: PassContext) -> Graph:
    """The graph itself: what is planned is recorded, and refused where it is too much."""
    strategy, limit = context.option("memory_planning", True), context.option("max_memory_gb")
    if strategy is False and limit is None:
        return graph
    sizes = largest_sizes(graph)
    if sizes is None:
        if limit is not None:
            context.record("ignored", "max_memory_gb: a size without an upper bound is known only at run time")
        return graph
    made = plan(graph, "greedy" if isinstance(strategy, bool) else strategy, sizes)
    if not isinstance(strategy, bool):
        context.record("choice", f"memory plan '{made.strategy}': {human(made.size)} instead of {human(made.total)}")
    if limit is not None:
        try:
            check_limit(graph, made, parse_bytes(limit), sizes)
        except MemoryLimitError as error:
            raise _advised(error, graph, context, parse_bytes(limit), sizes) from None
    return graph


def largest_sizes(graph: Graph) -> Mapping[str, int] | None:
    """Unknown sizes at their upper bounds; None where one has none."""
    found = symbols(*(d for i in graph.inputs for d in i.type.shape))
    if any(s.high is None for s in found):
        return None
    return {s.name: int(s.high) for s in found if s.high is not None}


def _advised(
    error: MemoryLimitError, graph: Graph, context: PassContext, limit: int, sizes: Mapping[str, int]
) -> MithrilError:
    """The same refusal with a remedy that was tried: segments that fit, or a batch that does."""
    if halves(graph)[1] and not context.option("gradient_checkpointing"):
        quiet = type(context)(backend=context.backend, options={"checkpoint_segments": None})
        smaller = gradient_checkpointing(graph, quiet)
        needed = plan(smaller, "greedy", sizes).size + sum(nbytes(i.type, sizes) for i in graph.inputs)
        if needed <= limit:
            return error.with_hint(f"gradient_checkpointing=True needs {human(needed)}")
    batch = _batch_that_fits(graph, limit, sizes)
    if batch is not None:
        return error.with_hint(f"a batch of {batch} fits")
    outside = sum(nbytes(i.type, sizes) for i in graph.with_role("param", "constant"))
    if outside > limit:
        return error.with_hint(f"the parameters alone are {human(outside)}: use a smaller dtype or a smaller model")
    return error.with_hint("a smaller batch, a smaller dtype, or mixed_precision=True needs less")


def _batch_that_fits(graph: Graph, limit: int, sizes: Mapping[str, int]) -> int | None:
    """The largest first axis of the inputs for which everything fits, taking activations as linear in it."""
    heads = {i.type.shape[0] for i in graph.with_role("input") if i.type.shape and not i.name.startswith("grad/")}
    if len(heads) != 1:
        return None
    batch = int(numel((substitute(heads.pop(), sizes),)))
    fixed = sum(nbytes(i.type, sizes) for i in graph.with_role("param", "state", "constant"))
    moving = plan(graph, "greedy", sizes).size + sum(nbytes(i.type, sizes) for i in graph.with_role("input"))
    fitting = int((limit - fixed) * batch / moving) if moving else 0
    return fitting if 0 < fitting < batch else None
