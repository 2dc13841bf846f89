"""The arena of a program with symbolic sizes: a memory plan for each combination of them, without the compiler."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mithril.backend import memory_plan
from mithril.graph import (
    Graph,
    Node,
    Shape,
    Size,
    TensorType,
    UnsupportedError,
    Value,
    dtype as as_dtype,
    parse_dim,
    substitute,
)


class StepOp:
    """Operation of the nodes that represent the steps of a program in its memory plan."""

    elementwise = False

    def __init__(self, name: str) -> None:
        self.name = name


@dataclass(frozen=True)
class ArenaPlan:
    """Steps with the values that they read and write, and the slots of the addresses of these values."""

    steps: Graph
    slots: Mapping[Value, int]
    arguments: Mapping[str, Shape]  # inputs of symbolic sizes
    stored: frozenset[Shape]  # shapes of stored values, whose positions have 31 bits
    strategy: str | Callable[..., Any]

    def offsets(self, sizes: Mapping[str, int]) -> tuple[list[tuple[int, int]], int]:
        """Return slots with offsets in the arena, and the bytes of the arena, for these sizes."""
        # Positions in arrays are numbers of 32 bits.
        if any(math.prod(int(substitute(n, sizes)) for n in shape) >= 1 << 31 for shape in self.stored):
            raise UnsupportedError("cannot run on backend 'c': a value has 2**31 elements or more for these sizes")
        plan = memory_plan.plan(self.steps, self.strategy, sizes, views=lambda node: False)
        return [(slot, plan.offset(v)) for v, slot in self.slots.items()], plan.size

    # -- on disk --------------------------------------------------------------------------------------------------
    def dump(self) -> bytes:
        """Serialize the plan; its strategy must have a name."""
        numbers: dict[Value, int] = {}

        def number(values: Iterable[Value | None]) -> list[int]:
            return [numbers.setdefault(v, len(numbers)) for v in values if v is not None]

        steps = [[number(node.operands), number(node.results)] for node in self.steps.nodes]
        slots = [[number([v])[0], slot] for v, slot in self.slots.items()]
        header = {
            "steps": steps,
            "slots": slots,
            "values": [[v.name, v.dtype.name, texts(v.shape)] for v in numbers],
            "arguments": {name: texts(shape) for name, shape in self.arguments.items()},
            "stored": sorted([texts(shape) for shape in self.stored], key=str),
            "strategy": self.strategy,
        }
        return json.dumps(header).encode()

    @staticmethod
    def load(data: bytes) -> ArenaPlan:
        header = json.loads(bytes(data))
        values = [Value(name, TensorType(as_dtype(kind), shape_of(shape))) for name, kind, shape in header["values"]]
        nodes = [
            Node(StepOp("step"), tuple(values[k] for k in read), {}, tuple(values[k] for k in written))  # type: ignore[arg-type]
            for read, written in header["steps"]
        ]
        return ArenaPlan(
            Graph((), tuple(nodes), ()),
            {values[k]: slot for k, slot in header["slots"]},
            {name: shape_of(shape) for name, shape in header["arguments"].items()},
            frozenset(shape_of(shape) for shape in header["stored"]),
            header["strategy"],
        )


def texts(shape: Shape) -> list[int | str]:
    """Return a shape whose symbolic sizes are strings."""
    return [n if isinstance(n, int) else str(n) for n in shape]


def shape_of(sizes: Iterable[int | str]) -> tuple[Size, ...]:
    """Return a shape from ``texts``."""
    return tuple(n if isinstance(n, int) else parse_dim(n) for n in sizes)
