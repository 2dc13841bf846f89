"""Data of an exported directory: names, types, weights, and the results that Python computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mithril.backend import ALIGNMENT, nbytes
from mithril.ir import Graph
from mithril_cbackend.c_names import unique
from mithril_cbackend.graph.call_layout import packed
from mithril_cbackend.program.executable import Executable

BOUND = "bound/"  # prefix of the checks whose result is 1 if a loop or a buffer ended too early
TRUNCATED = 1  # return code of a run that fails such a check
Arrays = Mapping[str, np.ndarray[Any, Any]]


class Contents:
    """A program with its weights, initial state, test inputs and expected results.

    Values that the program updates (state, and the parameters of a training step) are stored twice after the arena: a
    run reads one copy and writes the other. State that is only read is exported as a weight.
    """

    def __init__(self, executable: Executable, params: Arrays, inputs: Arrays, state: Arrays, name: str) -> None:
        self.name, self.prefix = name, name.upper()
        self.executable, self.program, self.graph = executable, executable.program, executable.graph
        self.target = executable.target
        self.inputs = dict(inputs)
        first = {i.name: np.asarray(state[i.name], order="C") for i in self.graph.with_role("state")}
        self.carried = carried_outputs(self.graph)
        self.params = dict(params)
        self.constants = {f"constant {slot}": array for slot, array in self.program.constants.items()}
        self.blob = {**self.params, **first, **self.constants}
        self.slots = {
            **{n: self.program.arguments[n] for n in (*self.params, *first)},
            **{f"constant {slot}": slot for slot in self.program.constants},
        }
        self.weights, offsets = packed(self.blob.values())
        self.offsets = dict(zip(self.blob, offsets, strict=True))
        self.copies: dict[str, tuple[int, int]] = {}  # updated value -> offsets of its two copies in the arena
        end = aligned(self.program.arena)
        for n in self.carried:
            size = aligned(nbytes(self.graph.input(n).type))
            self.copies[n] = end, end + size
            end += 2 * size
        self.arena_bytes = max(end, ALIGNMENT)
        self.runs = 3 if self.carried else 1  # later runs show that updated values are carried over
        self.flags = [r.name for r in self.graph.results_of("check") if r.of.startswith(BOUND)]
        self.codes: list[int] = []  # return codes of the test's runs
        self.results = self._run({**self.params, **first})
        used_names = set[str]()
        self.c_names = {n: unique(n, used_names) for n in self.inputs}
        self.outputs = {n: unique(f"out_{n}" if n in self.inputs else n, used_names) for n in self.results}

    def _run(self, carried: dict[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
        """Return the results of the last of the test's runs."""
        results: dict[str, Any] = {}
        for _ in range(self.runs):
            results = self.executable(carried, {**self.inputs, **carried})
            self.codes.append(TRUNCATED if any(np.any(results[n]) for n in self.flags) else 0)
            if self.codes[-1] == 0:
                carried = {**carried, **{n: np.array(results[result]) for n, result in self.carried.items()}}
        internal_results = {*self.carried.values(), *self.flags}
        return {n: np.array(x) for n, x in results.items() if n not in internal_results}


def carried_outputs(graph: Graph) -> dict[str, str]:
    """Return the results that become inputs of the next run, by input name."""
    carried = {r.of: r for r in graph.results_of("state")}
    return {
        i.name: carried[i.name].name
        for i in graph.with_role("state", "param")
        if i.name in carried and carried[i.name].type == i.type
    }


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
