"""Random graphs for hours: every level of a backend against the references, values and gradients.

``python tests/soak.py torch --graphs 10000``; prints each disagreement with its seed, and the figures at the end.

Compilers take most of the time, so levels with the same optimized graph share one executable, forward programs that
no call needs are not built, and LLVM works with little effort. Every ``--thorough``-th graph is compiled in full: an
executable for each level, LLVM and XLA as for users.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np

from mithril import plugins
from mithril.backend import BuildOptions
from mithril.graph import Graph, structural_hash
from mithril.passes import random_arguments
from mithril_testing.levels import LEVELS, REFERENCE, Levels, special_arguments
from mithril_testing.random_graphs import SMALL, WIDE, random_graph

LITTLE_EFFORT = {  # options of ml.compile
    "jax": {
        "jit_options": {"compiler_options": {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}}
    }
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("backend")
    parser.add_argument("--graphs", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="seed of the first graph")
    parser.add_argument("--levels", default=",".join(("none", *LEVELS)))
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after so long")
    parser.add_argument("--thorough", type=int, default=16, help="compile every n-th graph with full effort")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    backend = plugins.backend_class(options.backend)()
    figures: Counter[str] = Counter()
    end = time.monotonic() + 60 * options.minutes
    for seed in range(options.first, options.first + options.graphs):
        if time.monotonic() > end:
            break
        thorough = seed % options.thorough == 0
        figures["thorough"] += thorough
        with np.errstate(all="ignore"):
            try:
                lines = try_graph(seed, backend, options.levels.split(","), figures, thorough)
            except Exception as error:
                traceback.print_exc()
                lines = [f"{type(error).__name__}: {error}"]
        figures["graphs"] += 1
        figures["graphs that differ"] += bool(lines)
        for line in lines:
            print(f"seed {seed}: {line}", flush=True)
        if figures["graphs"] % 100 == 0:
            print(options.backend, f"to seed {seed}:", dict(figures), flush=True)
    print(options.backend, dict(figures))
    sys.exit(figures["graphs that differ"] > 0)


def try_graph(seed: int, backend: Any, levels: list[str], figures: Counter[str], thorough: bool = True) -> list[str]:
    """Return the differences of one graph; every fourth is also tried on infinities and nan, against level none."""
    graph = random_graph(seed, sizes=WIDE if seed % 3 == 0 else SMALL)
    if thorough:
        return differences(graph, seed, Levels(graph, backend), levels, figures)
    with little_effort(backend):
        programs = Levels(graph, sharing(backend), **LITTLE_EFFORT.get(backend.name, {}))
        return differences(graph, seed, programs, levels, figures)


def differences(graph: Graph, seed: int, programs: Levels, levels: list[str], figures: Counter[str]) -> list[str]:
    arguments = random_arguments(graph, seed)
    kernels = [i.name for i in graph.arguments if i.name.startswith("k")]
    special = special_arguments(graph, seed, overflow=False, finite=kernels)
    lines = []
    for level in levels:
        figures["comparisons"] += 1
        lines += programs.differences(level, arguments, gradient=True, base=REFERENCE)
        if seed % 4 == 0 and level in ("low", "medium"):
            figures["comparisons"] += 1
            lines += [f"special values: {s}" for s in programs.differences(level, special, gradient=True)]
    return lines


@contextmanager
def little_effort(backend: Any) -> Iterator[None]:
    """Let TVM's LLVM spend little effort; for other backends there are options of ``ml.compile``."""
    if backend.name != "c":
        yield
        return
    from mithril_cbackend.tir import machine_code

    target = machine_code._target

    def quick(cpu: str, threads: int, **options: Any) -> Any:
        return target(cpu, threads, **options, **{"opt-level": 0})

    with mock.patch.object(machine_code, "_target", quick):
        yield


class Deferred:
    """The executable of a forward program, which the comparison of gradients does not call."""

    source = None
    lowered = frozenset[str]()

    def __init__(self, graph: Graph, build: Callable[[], Any]) -> None:
        self.graph, self._build = graph, build

    def __call__(self, params: Any, inputs: Any) -> dict[str, Any]:
        return self._build()(params, inputs)  # type: ignore[no-any-return]


def sharing(backend: Any) -> Any:
    """Return a copy of a backend that builds one executable for equal graphs, and forward programs when called."""
    executables: dict[Any, Any] = {}

    def build(graph: Graph, options: BuildOptions) -> Any:
        if not graph.with_role("cotangent"):
            return Deferred(graph, lambda: backend.build(graph, options))
        tunes = backend.name == "c" and options.settings["optimization_level"] == "high"
        key = structural_hash(graph), tunes
        if key not in executables:
            executables[key] = backend.build(graph, options)
        return executables[key]

    shared = copy.copy(backend)
    shared.build = build
    return shared


if __name__ == "__main__":
    main()
