"""The C backend on the whole conformance kit."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from mithril.ir import Builder, Graph
from mithril_cbackend.graph.call_layout import RUN
from mithril_cbackend.tir import expr
from mithril_testing import BackendConformance


class TestC(BackendConformance):
    backend = "c"
    distribution = "mithril-cbackend"

    @pytest.fixture(autouse=True)
    def _text_alone(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        """What compares texts needs no machine code, which takes ten times as long."""
        if request.function.__name__ == "test_same_source_twice":
            monkeypatch.setattr(expr, "compiled", lambda *_: {RUN: None})

    def compare(
        self,
        graph: Graph,
        inputs: Mapping[str, np.ndarray[Any, Any]],
        factor: float,
        unsure: Mapping[str, float] | None = None,
    ) -> None:
        super().compare(sized(graph, inputs), inputs, factor, unsure)


def sized(graph: Graph, inputs: Mapping[str, np.ndarray[Any, Any]]) -> Graph:
    """The graph for inputs of these sizes: the kit tries special values on a graph of any size, which we do not run."""
    if all(i.type.is_static for i in graph.inputs):
        return graph
    builder = Builder(graph.name)
    with builder:
        known = {i.value: builder.input(i.name, inputs[i.name].shape, i.type.dtype) for i in graph.inputs}
        for node in graph.nodes:
            operands = [None if v is None else known[v] for v in node.operands]
            made = builder.emit(node.op, operands, node.attributes)
            known.update(zip(node.results, made, strict=True))
    return builder.build(dict(zip(graph.output_names, [known[v] for v in graph.outputs], strict=True)))
