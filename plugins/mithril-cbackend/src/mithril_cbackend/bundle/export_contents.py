"""Data of an exported directory: names, types, weights, and the results that Python computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mithril.backend import ALIGNMENT, nbytes
from mithril.graph import Graph, UnsupportedError
from mithril_cbackend.bundle.open_sizes import OpenSizes
from mithril_cbackend.c_names import unique
from mithril_cbackend.graph.call_layout import packed
from mithril_cbackend.program.executable import Executable

BOUND = "bound/"  # prefix of the checks whose result is 1 if a loop or a buffer ended too early
TRUNCATED = 1  # return code of a run that fails such a check
Arrays = Mapping[str, np.ndarray[Any, Any]]
TestInputs = Callable[[Mapping[str, int]], dict[str, np.ndarray[Any, Any]]]  # for symbolic sizes


@dataclass
class Case:
    """Inputs and expected results of the test program, and its return codes, for some sizes."""

    sizes: dict[str, int]
    inputs: dict[str, np.ndarray[Any, Any]]
    results: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)
    codes: list[int] = field(default_factory=list)


class Contents:
    """A program with its weights, initial state, test inputs and expected results.

    Values that the program updates (state, and the parameters of a training step) are stored twice after the arena: a
    run reads one copy and writes the other. State that is only read is exported as a weight. ``inputs`` returns the
    inputs of the test program for symbolic sizes, and ``sizes`` are those to begin with.
    """

    def __init__(
        self,
        executable: Executable,
        params: Arrays,
        inputs: TestInputs,
        state: Arrays,
        name: str,
        sizes: Mapping[str, int],
    ) -> None:
        self.name, self.prefix = name, name.upper()
        self.executable, self.program, self.graph = executable, executable.program, executable.graph
        self.target = executable.target
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
        end = aligned(self.program.arena) if not self.program.sizes else 0
        for n in self.carried:
            kind = self.graph.input(n).type
            if not kind.is_static:
                hint = "compile with static shapes=; the state of every run has the same size in C"
                raise UnsupportedError(f"cannot export to C: the state '{n}' has a symbolic size: {kind}", hint=hint)
            size = aligned(nbytes(kind))
            self.copies[n] = end, end + size
            end += 2 * size
        self.open = OpenSizes(self.program, self.graph.guards, end, name) if self.program.sizes else None
        examples = [{}] if self.open is None else self.open.examples(sizes)
        self.cases = [Case(sizes, inputs(sizes)) for sizes in examples]
        self.arena_bytes = max(end, ALIGNMENT) if self.open is None else max(map(self.open.arena, examples))
        self.runs = 3 if self.carried else 1  # later runs show that updated values are carried over
        self.flags = [r.name for r in self.graph.results_of("check") if r.of.startswith(BOUND)]
        for case in self.cases:
            self._run(case, {**self.params, **first})
        self.inputs, self.results = self.cases[0].inputs, self.cases[0].results
        used_names = set[str]()
        self.c_names = {n: unique(n, used_names) for n in self.inputs}
        self.outputs = {n: unique(f"out_{n}" if n in self.inputs else n, used_names) for n in self.results}

    @property
    def shapes(self) -> dict[str, tuple[Any, ...]]:
        """The shapes of the arguments by C name, with symbolic sizes."""
        types = {r.name: r.type for r in self.graph.results} | {i.name: i.type for i in self.graph.inputs}
        outputs = {r.name: r.type for r in self.graph.results}
        shapes: dict[str, tuple[Any, ...]] = {c: types[n].shape for n, c in self.c_names.items()}
        return shapes | {c: outputs[n].shape for n, c in self.outputs.items()}

    def _run(self, case: Case, carried: dict[str, np.ndarray[Any, Any]]) -> None:
        """Compute the results of the last of the test's runs."""
        results: dict[str, Any] = {}
        for _ in range(self.runs):
            results = self.executable(carried, {**case.inputs, **carried})
            case.codes.append(TRUNCATED if any(np.any(results[n]) for n in self.flags) else 0)
            if case.codes[-1] == 0:
                carried = {**carried, **{n: np.array(results[result]) for n, result in self.carried.items()}}
        internal_results = {*self.carried.values(), *self.flags}
        case.results = {n: np.array(x) for n, x in results.items() if n not in internal_results}


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
