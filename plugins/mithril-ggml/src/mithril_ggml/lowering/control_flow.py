"""Control flow: regions are programs of their own, run by a step of the program around them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from mithril.graph import Node
from mithril_ggml.lowering.table import Array, row
from mithril_ggml.program.program_builder import ProgramBuilder
from mithril_ggml.program.strided_tensor import Tensor

Run = Callable[[Sequence[Array]], list[Array]]


def _results(draft: ProgramBuilder, node: Node) -> list[Tensor]:
    return [draft.like(v) for v in node.results]


def _fill(outs: Sequence[Array], results: Sequence[Array]) -> None:
    for out, value in zip(outs, results):
        np.copyto(out, value)


@row("if")
def _if(draft: ProgramBuilder, node: Node, *operands: Tensor) -> list[Tensor]:
    then, other = (draft.settings.region(node, k) for k in range(2))
    outs, count = _results(draft, node), len(operands)

    def run(*arrays: Array) -> None:
        branch = then if arrays[0] else other
        _fill(arrays[count:], branch(arrays[1:count]))

    draft.numpy("if", run, operands, outs)
    return outs


@row("while")
def _while(draft: ProgramBuilder, node: Node, *operands: Tensor) -> list[Tensor]:
    condition, body = (draft.settings.region(node, k) for k in range(2))
    outs, count = _results(draft, node), len(operands)
    states, max_trips = node.attributes["states"], node.attributes["max_trips"]

    def run(*arrays: Array) -> None:
        current, rest = list(arrays[:states]), arrays[states:count]
        trips = 0
        while (max_trips is None or trips < max_trips) and condition([*current, *rest])[0]:
            current = body([*current, *rest])
            trips += 1
        _fill(arrays[count:], current)

    draft.numpy("while", run, operands, outs)
    return outs


@row("scan")
def _scan(draft: ProgramBuilder, node: Node, *operands: Tensor) -> list[Tensor]:
    body = draft.settings.region(node, 0)
    outs, count = _results(draft, node), len(operands)
    a = node.attributes
    carries, sequences, length = a["carries"], a["sequences"], a["length"]
    order = range(length - 1, -1, -1) if a["reverse"] else range(length)

    def run(*arrays: Array) -> None:
        current, rest = list(arrays[:carries]), arrays[carries + sequences : count]
        stacked = arrays[count + carries :]
        for k in order:
            elements = [x[k] for x in arrays[carries : carries + sequences]]
            results = body([*current, *elements, *rest])
            current = results[:carries]
            for out, value in zip(stacked, results[carries:]):
                out[k] = value
        _fill(arrays[count : count + carries], current)

    draft.numpy("scan", run, operands, outs)
    return outs
