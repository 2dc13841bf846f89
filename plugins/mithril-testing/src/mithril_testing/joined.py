"""All cases of an operation as one program, for backends whose compilation takes time for each program."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from mithril.graph import Graph
from mithril_testing.grown import join_graphs
from mithril_testing.running import Array, Arrays

Call = Callable[[Arrays], dict[str, Array]]
ERRORS = (Exception, pytest.skip.Exception, pytest.fail.Exception)


class JoinedCalls:
    """The results of one program of several calls, by the id of the call; none if there is no such program.

    If it fails, each call is a program of its own, so that the one at fault is named; ``error`` is the failure of the
    joined program if there is none.
    """

    def __init__(self, name: str, calls: Mapping[str, tuple[Graph, Arrays]], start: Callable[[Graph], Call]) -> None:
        parts = {f"c{k}": call for k, call in enumerate(calls)}
        self.name = name
        self.results: dict[str, dict[str, Array]] = {}
        self.error: BaseException | None = None
        try:
            graph = join_graphs([(prefix, calls[call][0]) for prefix, call in parts.items()], name)
            inputs = {f"{p}/{n}": array for p, call in parts.items() for n, array in calls[call][1].items()}
            outputs = start(graph)(inputs)
            assert list(outputs) == list(graph.output_names), f"outputs {list(outputs)}"
        except ERRORS as error:
            if not any(_fails(start, *call) for call in calls.values()):
                self.error = error
            return
        for prefix, call in parts.items():
            names = calls[call][0].output_names
            self.results[call] = {name: outputs[f"{prefix}/{name}"] for name in names}

    def result(self, call: str) -> dict[str, Array] | None:
        """Return the results of a call, or None if it is a program of its own."""
        if self.error is not None:
            message = f"samples of {self.name} run alone, but not as one program: {self.error}"
            raise AssertionError(message) from self.error
        return self.results.get(call)


def _fails(start: Callable[[Graph], Call], graph: Graph, inputs: Arrays) -> bool:
    try:
        start(graph)(inputs)
    except ERRORS:
        return True
    return False
