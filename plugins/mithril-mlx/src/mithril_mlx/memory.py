"""Peak memory of programs: MLX starts operations while others run, so that its allocator knows it, and no plan does."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mithril.backend import SourceExecutable, nbytes
from mithril.graph import Graph, TensorType
from mithril_mlx.mlx_loader import mx

# One thread starts operations, another computes them: a call in which the first is further ahead takes more memory.
CALLS = 3


def allocated(run: Callable[[], Any]) -> int:
    """Return the peak of allocated bytes during a call that evaluates its results, beyond those before it."""
    mx.synchronize()
    before: int = mx.get_active_memory()
    mx.reset_peak_memory()
    run()
    peak: int = mx.get_peak_memory()
    return peak - before


def of_calls(
    executable: Any, sizes: Mapping[str, int], zeros: Callable[[TensorType, Mapping[str, int]], Any]
) -> int | None:
    """Return the highest peak of a few calls with zeros; None if the program is not one of MLX, or may not fit."""
    if not isinstance(executable, SourceExecutable) or not _fits(executable.graph, sizes):
        return None
    params: dict[str, Any] = {}
    inputs: dict[str, Any] = {}
    for i in executable.graph.arguments:
        (params if i.role == "param" else inputs)[i.name] = zeros(i.type, sizes)
    mx.eval(params, inputs)
    with np.errstate(all="ignore"):  # operations that run as NumPy references
        return max(allocated(lambda: executable(params, dict(inputs))) for _ in range(CALLS))


def _fits(graph: Graph, sizes: Mapping[str, int]) -> bool:
    """Whether all values of a graph at once take less than the memory of this machine."""
    types = [i.type for i in graph.arguments] + [v.type for node in graph.nodes for v in node.results]
    return sum(nbytes(t, sizes) for t in types) < main_memory()


def main_memory() -> int:
    """Return the bytes of main memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
