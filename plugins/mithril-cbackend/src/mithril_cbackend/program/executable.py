"""Callable programs: arrays in, arrays out, through one address table.

Repeated calls allocate nothing: results are written into arrays of an earlier call once the caller has released them.
Repeated calls also run Python lines generated for the program, without loops over names.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from operator import is_, itemgetter
from sys import getrefcount
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from mithril.backend import LazyGraph
from mithril.graph import Graph, InputError, dtype as as_dtype
from mithril_cbackend.compile_target import CompileTarget
from mithril_cbackend.graph.call_layout import ARENA, CALL, RUN, Layout, aligned
from mithril_cbackend.lowering.packings import Array
from mithril_cbackend.program.c_text import c_visible
from mithril_cbackend.program.numpy_abi import KNOWN, address_of
from mithril_cbackend.program.written_calls import Repeated, written

if TYPE_CHECKING:
    from mithril.compiler import CompiledModel

    # programs from the cache must not import the compiler, and with it TVM
    from mithril_cbackend.lowering.element.kernel_builder import Machine
    from mithril_cbackend.program.host_steps import HostStep
    from mithril_cbackend.program.program import Program

SHORT = 1e-4  # seconds; shorter programs keep the GIL, since releasing it costs more than it gains
LONG = 0.25  # seconds; longer programs run in a thread, so that an interrupt need not wait for their end


def key_getter(names: list[str]) -> Callable[[Mapping[str, Any]], tuple[Any, ...]]:
    """Return a function that looks up these names in a mapping."""
    if len(names) > 1:
        return itemgetter(*names)
    return lambda given: tuple([given[name] for name in names])


def report(run: Callable[[], Any], failures: list[BaseException], ended: threading.Event) -> None:
    """Call the function; add the exception that it raises to ``failures``, and set ``ended``."""
    try:
        run()
    except BaseException as error:
        failures.append(error)
    finally:
        ended.set()


class ResultBuffer:
    """Arrays of earlier calls for one result, reused once no caller holds them."""

    MAX_ARRAYS = 3  # a loop that holds the last results during the next call needs two

    def __init__(self, name: str, slot: int, shape: tuple[int, ...], dtype: str) -> None:
        self.name, self.slot, self.shape, self.dtype = name, slot, shape, as_dtype(dtype).numpy
        self.size = math.prod(shape) * self.dtype.itemsize
        self.arrays: list[tuple[Array, int]] = []

    def array(self) -> tuple[Array, int]:
        """Return an array that can be overwritten, 64-byte aligned, and its address."""
        for cached in self.arrays:
            out = cached[0]
            # Three references: the pair, this name and the argument of getrefcount. Views refer to the base.
            if getrefcount(out) == 3 and getrefcount(out.base) == 2:
                return cached
        return self.allocate()

    def allocate(self) -> tuple[Array, int]:
        """Allocate an array."""
        out = aligned(self.size).view(self.dtype).reshape(self.shape)
        self.arrays.insert(0, (out, address_of(out)))
        del self.arrays[self.MAX_ARRAYS :]
        return self.arrays[0]


@dataclass(frozen=True)
class LoweredProgram:
    """Kernels and driver in TIR, and the machine they were generated for."""

    program: Program
    machine: Machine


def rewritten(graph: Graph, machine: Machine) -> LoweredProgram:
    """Generate the kernels and driver of a program again, equal to those of its machine code."""
    from mithril_cbackend.graph import integer_products
    from mithril_cbackend.program.program import write

    return LoweredProgram(write(integer_products.fused(graph, machine), machine, machine.plan), machine)


def executables(compiled: CompiledModel) -> list[Executable]:
    """Return the model's programs of this backend, the latest last."""
    programs = [p.executable for p in compiled.programs if isinstance(p.executable, Executable)]
    if not programs:
        hint = "compile it for backend 'c' with shapes=, or call it once"
        raise InputError("the model has no program of backend 'c' yet", hint=hint)
    return programs


class Executable:
    """Machine code with its arena, its address table and the arrays of its results."""

    def __init__(
        self, graph: LazyGraph, layout: Layout, target: CompileTarget, code: Any, write: Callable[[], LoweredProgram]
    ) -> None:
        self.layout, self.target = layout, target
        self.code = code  # the module of machine code, which must live as long as its functions
        self.library: bytes | None = None  # the same code as a shared library, until the cache has stored it
        self.run = code[RUN]
        self.short: bool | None = None  # whether runs keep the GIL; None before the first run
        self.interruptible = True  # whether runs need a thread; the first one, whose time is not known yet, does
        self._graph, self._write = graph, write
        self.lowered = layout.lowered
        self.plugins: list[str] = []  # the parts of plugins that took part, for comments
        self.host_steps: list[HostStep] = []  # called by the machine code, so they must live as long
        self.lock = threading.Lock()
        self.arena = aligned(layout.arena)
        self.table = np.zeros(layout.slots, np.int64)
        self.table[ARENA] = self.arena.ctypes.data
        for slot, array in layout.constants.items():
            self.table[slot] = array.ctypes.data
        self.slots = self.table.data
        self.address = self.table.ctypes.data
        self.params, self.inputs = layout.weights, layout.inputs
        self.results = [ResultBuffer(*row) for row in layout.results]
        self.get_params = key_getter([name for name, _ in self.params])
        self.bound: tuple[Any, ...] = (None,) * len(self.params)  # parameters whose addresses are in the table
        self.copies: list[Array] = []  # contiguous copies of strided parameters

    @property
    def graph(self) -> Graph:
        return self._graph.get()

    def release(self, graph: Callable[[], Graph]) -> None:
        """Release graphs with weights: the layout holds the packed constants that the machine code reads."""
        machine = self.machine
        self._graph = LazyGraph(graph)
        self._write = lambda: rewritten(self.graph, machine)
        self.__dict__.pop("written", None)

    def adopt(self, constants: Any) -> None:
        """Read the constants from a mapped file from now on."""
        self.layout = self.layout.moved(constants)
        for slot, array in self.layout.constants.items():
            self.slots[slot] = array.ctypes.data

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
        """Kernels and driver as readable C."""
        from mithril_cbackend.program.c_module import module_text

        above = "".join(f"/* {c_visible(line)} */\n" for line in self.plugins)
        return above + module_text(self.program, self.machine.lanes())

    def __call__(self, params: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        self.lock.acquire()  # ``with`` takes longer
        release = self.lock.release
        try:
            arguments = self.get_params(params)
            # Parameters are the same objects in most calls; one comparison in C replaces all their
            # addresses.
            if not all(map(is_, arguments, self.bound)):
                self.copies = self.write_addresses(self.slots, self.params, params)
                self.bound = arguments
            copies = self.write_addresses(self.slots, self.inputs, inputs)
            results = {name: self.writable(inputs[state]) for name, state in self.layout.updated.items()}
            for result in self.results:
                results[result.name], self.slots[result.slot] = result.array()
            run = self.time if self.short is None else partial(self.run, self.address)
            # Python runs signal handlers in the main thread only, and not while it is in machine code:
            # the program runs in another one, for which the main thread waits. Host steps run Python and
            # see the signal themselves.
            if not self.interruptible or self.host_steps or threading.current_thread() is not threading.main_thread():
                run()
            else:
                failures: list[BaseException] = []
                # An interrupted Thread.join of Python 3.11 takes the thread for ended.
                ended = threading.Event()
                threading.Thread(target=report, args=(run, failures, ended)).start()
                try:
                    ended.wait()
                except KeyboardInterrupt:  # the program continues in its thread; it reads and writes these arrays
                    release = partial(self.release_after, ended, [params, inputs, copies, results, self.copies])
                    raise
                if failures:
                    raise failures[0]
            if self.host_steps:
                self.raise_failure()
            del copies
            return results
        finally:
            release()

    def release_after(self, ended: threading.Event, arrays: list[Any]) -> None:
        """Release the lock once the program has ended; hold the arrays until then."""

        def wait() -> None:
            ended.wait()
            arrays.clear()
            self.lock.release()

        threading.Thread(target=wait).start()

    @staticmethod
    def writable(state: Any) -> Any:
        """Return a state that the program overwrites; raise InputError if it would overwrite a copy."""
        if type(state) is np.ndarray and state.flags.c_contiguous and state.flags.writeable:
            return state
        raise InputError("a state that is updated in place is not a writable array in C order", hint="np.array(state)")

    def time(self) -> None:
        """Run for the first time, and decide by the latency whether later runs release the GIL."""
        # The first run decides for all: its caches are cold, so that a program is at most taken for a
        # longer one.
        start = perf_counter()
        self.run(self.address)
        seconds = perf_counter() - start
        self.short, self.interruptible = seconds < SHORT, seconds > LONG
        self.run.release_gil = not self.short

    def raise_failure(self) -> None:
        """Raise the first exception of a host step, if there is one."""
        failures = self.host_steps[0].failures
        if failures:
            error = failures[0]
            failures.clear()
            raise error

    def repeated(self, params: Mapping[str, Any], inputs: Mapping[str, Any], otherwise: Repeated) -> Repeated:
        """Generate a fast call for these parameters and for inputs like these, which have been called before."""
        positions = {name: k for k, name in enumerate(inputs)}
        if (
            self.host_steps
            or self.interruptible
            or self.layout.updated
            or not (KNOWN and self.layout.callable and positions.keys() == {name for name, _ in self.inputs})
        ):
            return otherwise
        # A table of its own: the address of ``self.table`` belongs to calls that are checked in Python.
        table = np.concatenate([self.table, np.zeros(self.layout.expected, np.int64)])
        keep_alive = [self, self.arena, table, self.write_addresses(table.data, self.params, params)]
        # The machine code compares these addresses with the type and the dtype of each argument.
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
        if self.short and not self.layout.sizes:  # the GIL is held, so no other call runs concurrently
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
        """Write the addresses of arrays into a table, and return the copies of strided ones, which must stay alive."""
        copies = []
        for name, slot in arguments:
            x = arrays[name]
            if type(x) is not np.ndarray or not x.flags.c_contiguous:
                x = np.asarray(x, order="C")
                copies.append(x)
            slots[slot] = address_of(x)
        return copies
