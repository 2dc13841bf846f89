"""A program that can be called: arrays in, arrays out, through one table of addresses."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

from mithril.graph import Graph, iterate
from mithril_cbackend.program import ARENA, TABLE, Program
from mithril_cbackend.lowering.reader import shape_of

ALIGNMENT = 64


def aligned(size: int) -> np.ndarray[Any, Any]:
    """So many bytes that begin at a multiple of 64."""
    whole = np.zeros(size + ALIGNMENT, np.uint8)
    return whole[-whole.ctypes.data % ALIGNMENT :][:size]


class Executable:
    """The entry function, the arena it works in, and where its arguments come from."""

    def __init__(self, graph: Graph, program: Program, built: Any, run: Any, source: str) -> None:
        self.graph = graph
        self.program = program
        self.built = built  # keeps the machine code alive
        self.run = run
        self.source = source
        self.lowered = frozenset(node.op.name for node, _ in iterate(graph))
        self.lock = threading.Lock()
        self.arena = aligned(program.arena)
        self.table = np.zeros(program.slots, np.int64)
        self.table[ARENA] = self.arena.ctypes.data
        self.table[TABLE] = self.table.ctypes.data
        for slot, array in program.constants.items():
            self.table[slot] = array.ctypes.data
        self.address = ctypes.c_void_p(self.table.ctypes.data)
        arguments = graph.arguments
        self.params = [(i.name, program.arguments[i.name]) for i in arguments if i.role == "param"]
        self.inputs = [(i.name, program.arguments[i.name]) for i in arguments if i.role != "param"]
        self.results = [
            (name, slot, shape_of(v), v.dtype.numpy)
            for (name, slot), v in zip(program.results, graph.outputs, strict=True)
        ]
        self.bound: list[Any] = [None] * len(self.params)  # the parameters whose addresses stand in the table

    def __call__(self, params: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        table = self.table
        with self.lock:
            for k, (name, slot) in enumerate(self.params):
                x = params[name]
                if x is not self.bound[k]:
                    self.bound[k] = x
                    table[slot] = contiguous(x).ctypes.data if x.flags.c_contiguous else self._keep(k, x)
            kept = []
            for name, slot in self.inputs:
                x = inputs[name]
                if not x.flags.c_contiguous:
                    x = np.ascontiguousarray(x)
                    kept.append(x)
                table[slot] = x.ctypes.data
            made = {}
            for name, slot, shape, dtype in self.results:
                made[name] = out = np.empty(shape, dtype)
                table[slot] = out.ctypes.data
            self.run(self.address)
        return made

    def _keep(self, k: int, x: Any) -> int:
        """A parameter that is a view is copied once."""
        copy = np.ascontiguousarray(x)
        self.copies = {**getattr(self, "copies", {}), k: copy}
        return int(copy.ctypes.data)


def contiguous(x: Any) -> np.ndarray[Any, Any]:
    return x if x.flags.c_contiguous else np.ascontiguousarray(x)
