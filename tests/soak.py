"""Random graphs for hours: every level of a backend against the references, values and gradients.

``python tests/soak.py torch --graphs 10000``; prints each disagreement with its seed, and the figures at the end.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
import warnings
from collections import Counter

import numpy as np

from mithril import plugins
from mithril.passes import random_arguments
from mithril_testing.levels import LEVELS, REFERENCE, Levels, special_arguments
from mithril_testing.random_graphs import SMALL, WIDE, random_graph


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("backend")
    parser.add_argument("--graphs", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="seed of the first graph")
    parser.add_argument("--levels", default=",".join(("none", *LEVELS)))
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after so long")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    backend = plugins.backend_class(options.backend)()
    figures: Counter[str] = Counter()
    end = time.monotonic() + 60 * options.minutes
    for seed in range(options.first, options.first + options.graphs):
        if time.monotonic() > end:
            break
        with np.errstate(all="ignore"):
            try:
                lines = try_graph(seed, backend, options.levels.split(","), figures)
            except Exception as error:
                traceback.print_exc()
                lines = [f"{type(error).__name__}: {error}"]
        figures["graphs"] += 1
        figures["graphs that differ"] += bool(lines)
        for line in lines:
            print(f"seed {seed}: {line}", flush=True)
        if figures["graphs"] % 100 == 0:
            print(options.backend, dict(figures), flush=True)
    print(options.backend, dict(figures))
    sys.exit(figures["graphs that differ"] > 0)


def try_graph(seed: int, backend: object, levels: list[str], figures: Counter[str]) -> list[str]:
    """Return the differences of one graph; every fourth is also tried on infinities and nan, against level none."""
    graph = random_graph(seed, sizes=WIDE if seed % 3 == 0 else SMALL)
    programs = Levels(graph, backend)
    arguments = random_arguments(graph, seed)
    lines = []
    for level in levels:
        figures["comparisons"] += 1
        lines += programs.differences(level, arguments, gradient=True, base=REFERENCE)
        if seed % 4 == 0 and level in ("low", "medium"):
            figures["comparisons"] += 1
            kernels = [i.name for i in graph.arguments if i.name.startswith("k")]
            special = special_arguments(graph, seed, overflow=False, finite=kernels)
            lines += [f"special values: {s}" for s in programs.differences(level, special, gradient=True)]
    return lines


if __name__ == "__main__":
    main()
