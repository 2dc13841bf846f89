"""A program that can be called: arrays in, arrays out, through one table of addresses.

Nothing is allocated by a call that meets what the last one met: results are written again into the arrays of an earlier
call once nobody holds those any more. Calls that repeat run lines written for the program, without loops over names.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from operator import is_, itemgetter
from sys import getrefcount
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from mithril.base import InputError, dtype as as_dtype
from mithril.ir import Graph, LazyGraph
from mithril_cbackend.compile_target import CompileTarget
from mithril_cbackend.graph.call_layout import ARENA, CALL, RUN, Array, Layout, aligned
from mithril_cbackend.program.numpy_abi import KNOWN, address_of
from mithril_cbackend.program.written_calls import Repeated, written

if TYPE_CHECKING:
    from mithril.runtime import CompiledModel

    # the rest of the backend, and TVM with it, stays away from programs that come from the cache
    from mithril_cbackend.lowering.element.kernel_builder import Machine
    from mithril_cbackend.program.host_steps import HostStep
    from mithril_cbackend.program.program import Program

SHORT = 1e-4  # seconds: programs that take less keep Python's lock, since letting go of it takes longer than it gains


def key_getter(names: list[str]) -> Callable[[Mapping[str, Any]], tuple[Any, ...]]:
    """What gives a dictionary's values of these names."""
    if len(names) > 1:
        return itemgetter(*names)
    return lambda given: tuple([given[name] for name in names])


class ResultBuffer:
    """Where one result is written: arrays made by earlier calls, used again once nobody else holds them."""

    MAX_ARRAYS = 3  # a loop that keeps what the last call gave while the next one runs needs two

    def __init__(self, name: str, slot: int, shape: tuple[int, ...], dtype: str) -> None:
        self.name, self.slot, self.shape, self.dtype = name, slot, shape, as_dtype(dtype).numpy
        self.size = math.prod(shape) * self.dtype.itemsize
        self.arrays: list[tuple[Array, int]] = []

    def array(self) -> tuple[Array, int]:
        """One that can be written, beginning at a multiple of 64 bytes, and its address."""
        for cached in self.arrays:
            out = cached[0]
            # Held by the pair, by this name and by the call that counts. Views of it hold the bytes it is a view of.
            if getrefcount(out) == 3 and getrefcount(out.base) == 2:
                return cached
        return self.allocate()

    def allocate(self) -> tuple[Array, int]:
        """A new one."""
        out = aligned(self.size).view(self.dtype).reshape(self.shape)
        self.arrays.insert(0, (out, address_of(out)))
        del self.arrays[self.MAX_ARRAYS :]
        return self.arrays[0]


@dataclass(frozen=True)
class LoweredProgram:
    """Kernels and driver before they became machine code, and what they were written for."""

    program: Program
    machine: Machine


def rewritten(graph: Graph, machine: Machine) -> LoweredProgram:
    """Return kernels and driver of a program again, as they were written for its machine code."""
    from mithril_cbackend.program.program import write

    return LoweredProgram(write(graph, machine, machine.plan), machine)


def executables(compiled: CompiledModel) -> list[Executable]:
    """The programs that this backend has made for a model, the newest last."""
    programs = [p.executable for p in compiled.programs if isinstance(p.executable, Executable)]
    if not programs:
        hint = "compile it for backend 'c' with shapes=, or call it once"
        raise InputError("this model has no program of the C backend yet", hint=hint)
    return programs


class Executable:
    """The entry function, the arena it works in, and where its arguments come from."""

    def __init__(
        self, graph: LazyGraph, layout: Layout, target: CompileTarget, code: Any, write: Callable[[], LoweredProgram]
    ) -> None:
        self.layout, self.target = layout, target
        self.code = code  # the module of machine code, which must live as long as its functions
        self.run = code[RUN]
        self.short: bool | None = None  # whether runs keep Python's lock; known after the first
        self._graph, self._write = graph, write
        self.lowered = layout.lowered
        self.host_steps: list[HostStep] = []  # called back by the machine code; they live as long as it
        self.lock = threading.Lock()
        self.arena = aligned(layout.arena)
        self.table = np.zeros(layout.slots, np.int64)
        self.table[ARENA] = self.arena.ctypes.data
        for slot, array in layout.constants.items():
            self.table[slot] = array.ctypes.data
        self.slots = self.table.data
        self.address = self.table.ctypes.data
        self.params, self.inputs = layout.params, layout.inputs
        self.results = [ResultBuffer(*row) for row in layout.results]
        self.get_params = key_getter([name for name, _ in self.params])
        self.bound: tuple[Any, ...] = (None,) * len(self.params)  # the parameters whose addresses stand in the table
        self.copies: list[Array] = []  # of those that are views

    @property
    def graph(self) -> Graph:
        return self._graph.get()

    def release(self, graph: Callable[[], Graph]) -> None:
        """Let go of graphs with weights: the layout has those that machine code reads, in the order it reads them."""
        machine = self.machine
        self._graph = LazyGraph(graph)
        self._write = lambda: rewritten(self.graph, machine)
        self.__dict__.pop("written", None)

    @cached_property
    def written(self) -> LoweredProgram:
        return self._write()

    @property
    def program(self) -> Program:
        return self.written.program

    @property
    def machine(self) -> Machine:
        return self.written.machine

    @property
    def source(self) -> str:
        """The kernels and the driver, as readable C."""
        from mithril_cbackend.program.c_printer import module_text

        return module_text(self.program, self.machine.lanes())

    def __call__(self, params: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        self.lock.acquire()  # ``with`` takes longer
        try:
            arguments = self.get_params(params)
            if not all(map(is_, arguments, self.bound)):
                self.copies = self.write_addresses(self.slots, self.params, params)
                self.bound = arguments
            copies = self.write_addresses(self.slots, self.inputs, inputs)
            results = {}
            for result in self.results:
                results[result.name], self.slots[result.slot] = result.array()
            if self.short is None:
                self.time()
            else:
                self.run(self.address)
            if self.host_steps:
                self.raise_failure()
            del copies
            return results
        finally:
            self.lock.release()

    def time(self) -> None:
        """The first run, which shows how long one takes."""
        start = perf_counter()
        self.run(self.address)
        self.short = perf_counter() - start < SHORT
        self.run.release_gil = not self.short

    def raise_failure(self) -> None:
        """Raise the exception of a step that ran on the host."""
        failures = self.host_steps[0].failures
        if failures:
            error = failures[0]
            failures.clear()
            raise error

    def repeated(self, params: Mapping[str, Any], inputs: Mapping[str, Any], otherwise: Repeated) -> Repeated:
        """What a call does, written out for these parameters and inputs like these, which have been called with."""
        positions = {name: k for k, name in enumerate(inputs)}
        if self.host_steps or not (
            KNOWN and self.layout.callable and positions.keys() == {name for name, _ in self.inputs}
        ):
            return otherwise
        table = np.concatenate([self.table, np.zeros(self.layout.expected, np.int64)])
        keep_alive = [self, table, self.write_addresses(table.data, self.params, params)]
        kinds = [np.ndarray, *(inputs[name].dtype for name, _ in self.inputs)]
        table[self.layout.slots :] = list(map(id, kinds))
        run = self.code[CALL]
        run.release_gil = not self.short
        names: dict[str, Any] = {"run": run, "table": table.ctypes.data, "keep_alive": [keep_alive, kinds]}
        names |= {"getrefcount": getrefcount, "otherwise": otherwise}
        lines, arguments = ["keep_alive"], ", ".join(f"id(x{positions[name]})" for name, _ in self.inputs)
        for k, result in enumerate(self.results):
            names |= {f"arrays{k}": result.arrays, f"allocate{k}": result.allocate}
            lines += [
                f"for y{k}, address{k} in arrays{k}:",  # as in ResultBuffer.array
                f"    if getrefcount(y{k}) == 3 and getrefcount(y{k}.base) == 2:",
                "        break",
                "else:",
                f"    y{k}, address{k} = allocate{k}()",
            ]
            arguments += f", address{k}"
        if self.short:  # nothing else runs meanwhile
            lines.append(f"if run(table, {arguments}):")
        else:
            names |= {"acquire": self.lock.acquire, "release": self.lock.release}
            lines += [
                "acquire()",
                "try:",
                f"    other = run(table, {arguments})",
                "finally:",
                "    release()",
                "if other:",
            ]
        results = ", ".join(f"{result.name!r}: y{k}" for k, result in enumerate(self.results))
        lines += ["    return otherwise(params, inputs)", f"return {{{results}}}"]
        return written(params, inputs, lines, names)

    def write_addresses(self, slots: Any, arguments: list[tuple[str, int]], arrays: Mapping[str, Any]) -> list[Array]:
        """Write the addresses of these arrays into a table. What had to be copied is given back, to be kept."""
        copies = []
        for name, slot in arguments:
            x = arrays[name]
            if type(x) is not np.ndarray or not x.flags.c_contiguous:
                x = np.asarray(x, order="C")
                copies.append(x)
            slots[slot] = address_of(x)
        return copies
