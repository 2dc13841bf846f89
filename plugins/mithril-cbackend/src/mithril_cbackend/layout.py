"""What a call needs to know of a program: where in the table of addresses its arrays stand, and what they are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from mithril.graph import Graph, iterate
from mithril.types import dtype as as_dtype

if TYPE_CHECKING:
    from mithril_cbackend.program import Program

Array = np.ndarray[Any, Any]
ARENA = 0  # the first slot of the table


@dataclass(frozen=True)
class Layout:
    """Names with their slots; results with shapes and names of dtypes as well."""

    arena: int
    slots: int
    params: list[tuple[str, int]]
    inputs: list[tuple[str, int]]
    results: list[tuple[str, int, tuple[int, ...], str]]
    lowered: frozenset[str]
    constants: dict[int, Array] = field(default_factory=dict)

    @staticmethod
    def of(graph: Graph, program: Program) -> Layout:
        arguments = [(i, program.arguments[i.name]) for i in graph.arguments]
        return Layout(
            program.arena,
            program.slots,
            [(i.name, slot) for i, slot in arguments if i.role == "param"],
            [(i.name, slot) for i, slot in arguments if i.role != "param"],
            [
                (name, slot, tuple(map(int, v.type.shape)), v.dtype.name)
                for (name, slot), v in zip(program.results, graph.outputs, strict=True)
            ],
            frozenset(node.op.name for node, _ in iterate(graph)),
            program.constants,
        )

    def dump(self) -> dict[str, bytes]:
        """As bytes: the numbers, and the constants one after the other."""
        about = {
            "arena": self.arena,
            "slots": self.slots,
            "params": self.params,
            "inputs": self.inputs,
            "results": self.results,
            "lowered": sorted(self.lowered),
            "constants": [[slot, x.dtype.name, x.shape] for slot, x in self.constants.items()],
        }
        return {
            "layout": json.dumps(about).encode(),
            "constants": b"".join(x.tobytes() for x in self.constants.values()),
        }

    @staticmethod
    def load(parts: Mapping[str, bytes]) -> Layout:
        about = json.loads(parts["layout"])
        constants, at = {}, 0
        for slot, kind, shape in about["constants"]:
            dtype = as_dtype(kind).numpy
            count = int(np.prod(shape, dtype=np.int64))
            constants[slot] = np.frombuffer(parts["constants"], dtype, count, at).reshape(shape)
            at += count * dtype.itemsize
        return Layout(
            about["arena"],
            about["slots"],
            [(name, slot) for name, slot in about["params"]],
            [(name, slot) for name, slot in about["inputs"]],
            [(name, slot, tuple(shape), kind) for name, slot, shape, kind in about["results"]],
            frozenset(about["lowered"]),
            constants,
        )
