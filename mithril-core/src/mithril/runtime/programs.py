"""The programs of one compiled model and the calls that use them: bounded, the least recently used go first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator

from mithril.base import Decisions, TensorType
from mithril.runtime.program import Program, Request

DEFAULT = 64  # programs of a model, or sizes of a program that its backend compiles for each
CALLS = 16  # records of calls for each program that may be kept: these are small

Record = tuple[Program, dict[str, TensorType]]  # the program for a call, and the exact types of its inputs


class Programs:
    """Programs by request and records of calls by the types of their inputs. Threads may share it."""

    def __init__(self, limit: int, decisions: Decisions, sizes: bool = False) -> None:
        self.limit = limit
        self.sizes = sizes  # whether the backend itself compiles a program again for each size
        self.made = 0
        self._decisions = decisions
        self._lock = threading.RLock()
        self._programs: OrderedDict[Request, tuple[int, Program]] = OrderedDict()  # with the number of each
        self._calls: OrderedDict[Hashable, Record] = OrderedDict()
        self._making: dict[Request, threading.Event] = {}

    def __len__(self) -> int:
        return len(self._programs)

    def __iter__(self) -> Iterator[Program]:
        """Iterate in the order in which they were made."""
        with self._lock:
            ordered = sorted(self._programs.values(), key=lambda numbered: numbered[0])
        return iter([program for _, program in ordered])

    def call(self, key: Hashable) -> Record | None:
        """Return the record of a call like this one."""
        with self._lock:
            record = self._calls.get(key)
            if record is not None:
                self._calls.move_to_end(key)
                if record[0].request in self._programs:
                    self._programs.move_to_end(record[0].request)
            return record

    def newest_types(self) -> dict[str, TensorType]:
        """Return the types of the inputs of the last call that was recorded or repeated; empty before the first."""
        with self._lock:
            _, types = next(reversed(self._calls.values()), (None, {}))
            return types

    def remember(self, key: Hashable, record: Record) -> None:
        """Keep the record of a call, and let others go."""
        program = record[0]
        with self._lock:
            self._calls[key] = record
            same = [k for k, (p, _) in self._calls.items() if p is program] if self.sizes else []
            if len(same) > self.limit:
                self._forget_sizes(program, same[:-1])
            while len(self._calls) > CALLS * self.limit:
                self._calls.popitem(last=False)

    def _forget_sizes(self, program: Program, keys: list[Hashable]) -> None:
        """Drop all that the backend compiled for single sizes; those still in use are compiled once more."""
        getattr(program.executable, "forget_sizes", _nothing)()
        for key in keys:
            del self._calls[key]
        self._decisions.record(
            "evicted", f"a program was compiled for more than max_programs={self.limit} sizes: these are dropped"
        )

    def make(self, request: Request, function: Callable[[Request], Program]) -> Program:
        """Return the program for a request. Threads that ask meanwhile wait for the one that makes it."""
        while True:
            with self._lock:
                known = self._programs.get(request)
                if known is not None:
                    self._programs.move_to_end(request)
                    return known[1]
                event = self._making.get(request)
                if event is None:
                    mine = self._making[request] = threading.Event()
                    break
            event.wait()
        try:
            program = function(request)
            with self._lock:
                self.made += 1
                self._programs[request] = self.made, program
                self._evict()
            return program
        finally:
            with self._lock:
                del self._making[request]
            mine.set()

    def _evict(self) -> None:
        while len(self._programs) > self.limit:
            request, (number, program) = self._programs.popitem(last=False)
            self._drop_calls(lambda other, program=program: other is program)  # type: ignore[misc]
            getattr(program.executable, "forget_sizes", _nothing)()  # frameworks may hold on to the executable
            inputs = ", ".join(f"{name}: {t}" for name, t in request.types)
            self._decisions.record(
                "evicted", f"program {number} for {inputs} was dropped: max_programs={self.limit} are kept"
            )

    def drop_bound(self) -> None:
        """Forget the programs that have bound parameters inside."""
        with self._lock:
            for request in [r for r in self._programs if r.binding]:
                del self._programs[request]
            self._drop_calls(lambda program: bool(program.request.binding))

    def _drop_calls(self, chosen: Callable[[Program], bool]) -> None:
        for key in [k for k, (program, _) in self._calls.items() if chosen(program)]:
            del self._calls[key]


def _nothing() -> None:
    """Stand in for executables that keep nothing for single sizes."""
