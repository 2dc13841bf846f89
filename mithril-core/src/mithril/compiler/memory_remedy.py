"""Tested remedies for programs that exceed ``max_memory_gb``: checkpointing, a smaller batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mithril import plugins
from mithril.backend import Backend, format_bytes, nbytes, parse_bytes
from mithril.base import MemoryLimitError, numel, substitute
from mithril.ir import Graph
from mithril.passes import PassContext
from mithril.runtime import MemoryUse, ProgramMemory, largest_sizes, memory_use

PLANNED = ("arena", "library")  # backends whose estimate is exact after the build
CHECKPOINTING = "gradient-checkpointing"


def check_memory(memory: ProgramMemory, settings: Mapping[str, Any], sizes: Mapping[str, int] | None = None) -> None:
    """Raise MemoryLimitError if a program exceeds ``max_memory_gb`` for these sizes, or its largest ones."""
    if settings["max_memory_gb"] is None:
        return  # do not access the graph, which may not be parsed yet
    sizes = largest_sizes(memory.graph) if sizes is None else sizes
    if sizes is not None:
        _check_peak(memory.at(sizes), memory.graph, memory.backend, settings, sizes)


def check_arguments(graph: Graph, backend: Backend, settings: Mapping[str, Any]) -> None:
    """Raise MemoryLimitError before the build; if an exact check follows, only for the size of the arguments."""
    if settings["max_memory_gb"] is None or (sizes := largest_sizes(graph)) is None:
        return
    use = memory_use(graph, backend, sizes)
    if backend.capabilities.memory in PLANNED and use.outside <= parse_bytes(settings["max_memory_gb"]):
        return
    _check_peak(use, graph, backend, settings, sizes)


def _check_peak(
    use: MemoryUse, graph: Graph, backend: Backend, settings: Mapping[str, Any], sizes: Mapping[str, int]
) -> None:
    limit = parse_bytes(settings["max_memory_gb"])
    if use.peak > limit:
        raise over_limit(use, graph, limit, sizes).with_hint(remedy(graph, backend, settings, use, limit, sizes))


def remedy(
    graph: Graph, backend: Backend, settings: Mapping[str, Any], use: MemoryUse, limit: int, sizes: Mapping[str, int]
) -> str:
    """Return the hint for a program that exceeds the limit."""
    if CHECKPOINTING in plugins.passes() and not settings.get("gradient_checkpointing"):
        context = PassContext(backend=backend, options={"checkpoint_segments": None})
        smaller = plugins.load_pass(CHECKPOINTING)(graph, context)
        needed = use.peak if smaller is graph else memory_use(smaller, backend, sizes).peak
        if needed <= limit:
            return f"gradient_checkpointing=True needs {format_bytes(needed)}"
    batch = _batch_that_fits(graph, use, limit, sizes)
    if batch is not None:
        return f"a batch of {batch} fits"
    if use.parameters > limit:
        return f"the parameters alone are {format_bytes(use.parameters)}: use a smaller dtype or a smaller model"
    return "a smaller batch, a smaller dtype, or mixed_precision=True needs less"


def _batch_that_fits(graph: Graph, use: MemoryUse, limit: int, sizes: Mapping[str, int]) -> int | None:
    """Return the largest batch that fits, assuming that all memory except parameters scales with it."""
    heads = {i.type.shape[0] for i in graph.with_role("input") if i.type.shape}
    if len(heads) != 1:
        return None
    batch = int(numel((substitute(heads.pop(), sizes),)))
    fixed = use.parameters + use.state
    moving = use.peak - fixed
    fitting = int((limit - fixed) * batch / moving) if moving else 0
    return fitting if 0 < fitting < batch else None


def over_limit(use: MemoryUse, graph: Graph, limit: int, sizes: Mapping[str, int] | None = None) -> MemoryLimitError:
    """Return the error for a program that exceeds the limit, with its largest values."""
    values = [
        (nbytes(v.type, sizes), v)
        for v in (*(v for n in graph.nodes for v in n.results), *(i.value for i in graph.inputs))
    ]
    largest = sorted(values, key=lambda row: -row[0])[:5]
    qualifier = "" if use.exact else "about "
    return MemoryLimitError(
        f"this program needs {qualifier}{format_bytes(use.peak)}, but max_memory_gb allows {format_bytes(limit)}",
        facts=[
            (
                f"parameters and inputs {format_bytes(use.outside)}; "
                f"values and results {format_bytes(use.workspace)} ({use.source})"
            ),
            "largest: " + "; ".join(f"'{v.name}' {v.type} {format_bytes(size)}" for size, v in largest),
        ],
    )
