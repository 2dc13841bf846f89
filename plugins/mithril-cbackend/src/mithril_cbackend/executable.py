"""A program that can be called: arrays in, arrays out, through one table of addresses.

Nothing is allocated by a call that meets what the last one met: results are written again into the arrays of an earlier
call once nobody holds those any more.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

from mithril.graph import Graph, iterate
from mithril_cbackend.lowering.reader import shape_of
from mithril_cbackend.program import ARENA, TABLE, Program

ALIGNMENT = 64
_DATA = 16  # where a NumPy array object keeps its address: the first field after CPython's object header
_read = ctypes.c_int64.from_address


def _address_by_layout(x: np.ndarray[Any, Any]) -> int:
    return _read(id(x) + _DATA).value


def _address_by_name(x: np.ndarray[Any, Any]) -> int:
    return x.ctypes.data


def _layout_holds() -> bool:
    probes = [np.zeros(3), np.zeros((2, 2), np.int8)[1:], np.zeros((), np.float32)]
    usual = object.__basicsize__ == _DATA and sys.implementation.name == "cpython"
    return usual and all(_address_by_layout(p) == p.ctypes.data for p in probes)


address_of = _address_by_layout if _layout_holds() else _address_by_name  # the first takes a fifth of the time


def aligned(size: int) -> np.ndarray[Any, Any]:
    """So many bytes that begin at a multiple of 64."""
    whole = np.zeros(size + ALIGNMENT, np.uint8)
    return whole[-whole.ctypes.data % ALIGNMENT :][:size]


def aligned_array(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """An array that begins at a multiple of 64 bytes."""
    count = int(np.prod(shape, dtype=np.int64))
    whole = np.empty(count * dtype.itemsize + ALIGNMENT, np.uint8)
    start = -whole.ctypes.data % ALIGNMENT
    return whole[start : start + count * dtype.itemsize].view(dtype).reshape(shape)


class Executable:
    """The entry function, the arena it works in, and where its arguments come from."""

    def __init__(self, graph: Graph, program: Program, built: Any, run: Any, lanes: int = 16) -> None:
        self.graph = graph
        self.program = program
        self.built = built  # keeps the machine code alive
        self.run = run
        self.lanes = lanes
        self.lowered = frozenset(node.op.name for node, _ in iterate(graph))
        self.lock = threading.Lock()
        self.arena = aligned(program.arena)
        self.table = np.zeros(program.slots, np.int64)
        self.table[ARENA] = self.arena.ctypes.data
        self.table[TABLE] = self.table.ctypes.data
        for slot, array in program.constants.items():
            self.table[slot] = array.ctypes.data
        self.slots = memoryview(self.table)
        self.address = ctypes.c_void_p(self.table.ctypes.data)
        arguments = graph.arguments
        self.params = [(i.name, program.arguments[i.name]) for i in arguments if i.role == "param"]
        self.inputs = [(i.name, program.arguments[i.name]) for i in arguments if i.role != "param"]
        self.results = [
            (name, slot, shape_of(v), v.dtype.numpy)
            for (name, slot), v in zip(program.results, graph.outputs, strict=True)
        ]
        self.bound: list[Any] = [None] * len(self.params)  # the parameters whose addresses stand in the table
        self.copies: dict[int, Any] = {}  # of parameters that are views
        self.written: list[Any] = [None] * len(self.results)

    @property
    def source(self) -> str:
        """The kernels and the driver, as readable C."""
        from mithril_cbackend.source import module_text

        return module_text(self.program, self.lanes)

    def __call__(self, params: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        slots, address, count = self.slots, address_of, sys.getrefcount
        with self.lock:
            bound = self.bound
            for k, (name, slot) in enumerate(self.params):
                x = params[name]
                if x is not bound[k]:
                    bound[k] = x
                    self.copies[k] = x = np.ascontiguousarray(x)
                    slots[slot] = x.ctypes.data
            kept = None
            for name, slot in self.inputs:
                x = inputs[name]
                if not x.flags.c_contiguous:
                    x = np.ascontiguousarray(x)
                    kept = (kept, x)
                slots[slot] = address(x)
            made = {}
            written = self.written
            for k, (name, slot, shape, dtype) in enumerate(self.results):
                out = written[k]
                # An array held by this list and this name only; views of it hold its base.
                if out is None or count(out) > 3 or count(out.base) > 2:
                    written[k] = out = aligned_array(shape, dtype)
                    slots[slot] = out.ctypes.data
                made[name] = out
            self.run(self.address)
        return made
