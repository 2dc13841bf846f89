"""All cases of an operation as one program, for backends whose compilation takes time for each program."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from mithril.base import UnsupportedError
from mithril.ir import Graph
from mithril_testing.grown import join_graphs
from mithril_testing.running import Array, Arrays

Call = Callable[[Arrays], dict[str, Array]]


class JoinedCalls:
    """The results of one program of several calls, by the id of the call; none if there is no such program."""

    def __init__(self, name: str, calls: Mapping[str, tuple[Graph, Arrays]], start: Callable[[Graph], Call]) -> None:
        parts = {f"c{k}": call for k, call in enumerate(calls)}
        graph = join_graphs([(prefix, calls[call][0]) for prefix, call in parts.items()], name)
        inputs = {f"{p}/{n}": array for p, call in parts.items() for n, array in calls[call][1].items()}
        self.results: dict[str, dict[str, Array]] = {}
        try:
            outputs = start(graph)(inputs)
        except (UnsupportedError, pytest.skip.Exception):
            return  # each call is a program of its own then, so that the unsupported one is named
        for prefix, call in parts.items():
            names = calls[call][0].output_names
            self.results[call] = {name: outputs[f"{prefix}/{name}"] for name in names}
