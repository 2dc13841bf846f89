"""What a call needs to know of a program: where in the table of addresses its arrays stand, and what they are."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mithril.backend import ALIGNMENT
from mithril.base import dtype as as_dtype

Array = np.ndarray[Any, Any]
ARENA = 0  # the first slot of the table
RUN, CALL = "run", "call"  # the functions that Python calls
MOST = 16  # arrays that ``call`` takes


def aligned(size: int) -> Array:
    """So many bytes that begin at a multiple of 64."""
    whole = np.zeros(size + ALIGNMENT, np.uint8)
    return whole[-whole.ctypes.data % ALIGNMENT :][:size]


def packed(arrays: Iterable[Array]) -> tuple[bytes, list[int]]:
    """Arrays one after the other, each at a multiple of 64 bytes, and where they begin."""
    whole, offsets = bytearray(), []
    for array in arrays:
        whole += bytes(-len(whole) % ALIGNMENT)
        offsets.append(len(whole))
        whole += array.tobytes()
    return bytes(whole), offsets


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

    @property
    def callable(self) -> bool:
        """Whether there is a function ``call``."""
        return len(self.inputs) + len(self.results) <= MOST

    @property
    def expected(self) -> int:
        """How many words ``call`` reads behind the addresses in the table: a class, and a dtype for each input."""
        return 1 + len(self.inputs)

    def dump(self) -> dict[str, bytes]:
        """As bytes: the numbers, and the constants one after the other."""
        constants, offsets = packed(self.constants.values())
        about = {
            "arena": self.arena,
            "slots": self.slots,
            "params": self.params,
            "inputs": self.inputs,
            "results": self.results,
            "lowered": sorted(self.lowered),
            "constants": [
                [slot, at, x.dtype.name, x.shape] for (slot, x), at in zip(self.constants.items(), offsets, strict=True)
            ],
        }
        return {"layout": json.dumps(about).encode(), "constants": constants}

    @staticmethod
    def load(parts: Mapping[str, bytes]) -> Layout:
        about = json.loads(parts["layout"])
        constants, data = {}, parts["constants"]
        whole = aligned(len(data))
        whole[:] = np.frombuffer(data, np.uint8)
        for slot, at, kind, shape in about["constants"]:
            dtype = as_dtype(kind).numpy
            constants[slot] = whole[at : at + math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)
        return Layout(
            about["arena"],
            about["slots"],
            [(name, slot) for name, slot in about["params"]],
            [(name, slot) for name, slot in about["inputs"]],
            [(name, slot, tuple(shape), kind) for name, slot, shape, kind in about["results"]],
            frozenset(about["lowered"]),
            constants,
        )
