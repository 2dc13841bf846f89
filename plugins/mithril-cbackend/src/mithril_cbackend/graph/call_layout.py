"""Layout of a call: the slots of its arrays in the address table, with their shapes and dtypes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from mithril.backend import ALIGNMENT
from mithril.graph import dtype as as_dtype, parse_dim
from mithril_cbackend.lowering.packings import Array, PackedParameter

ARENA = 0  # the first slot of the table
RUN, CALL = "run", "call"  # the functions that Python calls
MAX_ARRAYS = 16  # arguments of ``call``


def aligned(size: int) -> Array:
    """Allocate `size` bytes, 64-byte aligned."""
    buffer = np.zeros(size + ALIGNMENT, np.uint8)
    return buffer[-buffer.ctypes.data % ALIGNMENT :][:size]


def at_aligned_address(array: Array) -> Array:
    """Return a contiguous array that is 64-byte aligned, a copy if it is not."""
    # NumPy aligns to 16 bytes: three of four arrays have vectors across two cache lines, and a layer of 128
    # units, whose weights stay in the cache, took 1.45 times as long.
    array = np.asarray(array, order="C")
    if array.ctypes.data % ALIGNMENT == 0:
        return array
    copy = aligned(array.nbytes).view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def packed(arrays: Iterable[Array]) -> tuple[bytearray, list[int]]:
    """Concatenate arrays, each 64-byte aligned, and return their offsets."""
    data, offsets = bytearray(), []
    for array in arrays:
        # A bool before them put floats at odd addresses (commit 936da626).
        data += bytes(-len(data) % ALIGNMENT)
        offsets.append(len(data))
        data.extend(array.reshape(-1).view(np.uint8).data)
    return data, offsets


def in_place(data: Any) -> Array:
    """Return bytes as an array that is 64-byte aligned: those of a mapped file without a copy."""
    array = np.frombuffer(data, np.uint8)
    if array.ctypes.data % ALIGNMENT == 0:
        return array
    copy = aligned(len(data))
    copy[:] = array
    return copy


@dataclass(frozen=True)
class Layout:
    """Slots by name; results with their shapes and dtype names."""

    arena: int
    slots: int
    params: list[tuple[str, int]]
    inputs: list[tuple[str, int]]
    results: list[tuple[str, int, tuple[Any, ...], str]]
    lowered: frozenset[str]
    constants: dict[int, Array] = field(default_factory=dict)
    updated: dict[str, str] = field(default_factory=dict)  # result -> the state in whose memory it is written
    sizes: dict[str, int] = field(default_factory=dict)  # slot of each symbolic size
    packed: dict[PackedParameter, int] = field(default_factory=dict)  # copies of bound parameters

    @property
    def weights(self) -> list[tuple[str, int]]:
        """The parameters that calls read, and the packed copies of bound ones."""
        return [*self.params, *((x.name, slot) for x, slot in self.packed.items())]

    def bound(self, params: Mapping[str, Any], forms: MutableMapping[str, Array]) -> dict[str, Any]:
        """Return the arrays that calls read for bound parameters; ``forms`` has the packed copies of other programs."""
        weights = {name: params[name] for name, _ in self.params}
        for x in self.packed:
            copy = forms.get(x.name)
            weights[x.name] = forms[x.name] = at_aligned_address(x.of(params)) if copy is None else copy
        return weights

    @property
    def callable(self) -> bool:
        """Whether the program has the entry function ``call``."""
        return len(self.inputs) + len(self.results) <= MAX_ARRAYS

    @property
    def expected(self) -> int:
        """Number of words that ``call`` reads after the addresses: a class, and a dtype for each input."""
        return 1 + len(self.inputs)

    def dump(self) -> dict[str, bytes | bytearray]:
        """Serialize the layout and its constants."""
        constants, offsets = packed(self.constants.values())
        header = {
            "arena": self.arena,
            "slots": self.slots,
            "params": self.params,
            "inputs": self.inputs,
            "results": [
                (name, slot, [n if isinstance(n, int) else str(n) for n in shape], kind)
                for name, slot, shape, kind in self.results
            ],
            "lowered": sorted(self.lowered),
            "updated": self.updated,
            "sizes": self.sizes,
            "packed": [(asdict(x), slot) for x, slot in self.packed.items()],
            "constants": [
                [slot, offset, x.dtype.name, x.shape]
                for (slot, x), offset in zip(self.constants.items(), offsets, strict=True)
            ],
        }
        return {"layout": json.dumps(header).encode(), "constants": constants}

    def moved(self, data: Any) -> Layout:
        """Return the layout with its constants read from ``data``, in the order of ``dump``."""
        constants, start = {}, 0
        buffer = in_place(data)
        for slot, x in self.constants.items():
            start += -start % ALIGNMENT
            constants[slot] = buffer[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
            start += x.nbytes
        return replace(self, constants=constants)

    @staticmethod
    def load(parts: Mapping[str, Any]) -> Layout:
        header = json.loads(parts["layout"])
        constants, buffer = {}, in_place(parts["constants"])
        for slot, offset, kind, shape in header["constants"]:
            dtype = as_dtype(kind).numpy
            constants[slot] = buffer[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)
        return Layout(
            header["arena"],
            header["slots"],
            [(name, slot) for name, slot in header["params"]],
            [(name, slot) for name, slot in header["inputs"]],
            [
                (name, slot, tuple(n if isinstance(n, int) else parse_dim(n) for n in shape), kind)
                for name, slot, shape, kind in header["results"]
            ],
            frozenset(header["lowered"]),
            constants,
            header["updated"],
            header["sizes"],
            {PackedParameter.load(x): slot for x, slot in header["packed"]},
        )
