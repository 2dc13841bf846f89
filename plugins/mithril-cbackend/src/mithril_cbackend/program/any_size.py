"""Programs with symbolic sizes: one machine code for all sizes, and a memory plan for each combination of them.

The sizes are words of the address table, and arguments of the kernels. The addresses of intermediate values are words
of the table, too: they are planned in Python when a size is new, which takes milliseconds. The arena grows as required.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mithril.graph import bind, substitute
from mithril_cbackend.graph.call_layout import ARENA, aligned
from mithril_cbackend.program.arena_plan import ArenaPlan
from mithril_cbackend.program.executable import Executable, ResultBuffer
from mithril_cbackend.program.written_calls import Repeated

KEPT = 64  # combinations of sizes whose memory plans and result arrays are held


@dataclass
class Sized:
    """The words of the table for one combination of sizes: the sizes, and offsets in the arena."""

    sizes: dict[str, int]
    offsets: list[tuple[int, int]]  # slot, bytes from the beginning of the arena
    arena: int
    results: list[ResultBuffer]


class AnySizeExecutable(Executable):
    """A program that runs all sizes."""

    def __init__(self, arena_plan: ArenaPlan, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.arena_plan = arena_plan
        self.choosing = threading.Lock()
        self.selected: Sized | None = None
        self.plans: dict[Any, Sized] = {}
        self.shapes = arena_plan.arguments

    def __call__(self, params: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        arguments = {**params, **inputs}
        key = self.key(arguments)
        with self.choosing:
            sized = self.plans.get(key)
            if sized is None:
                sized = self.plans[key] = self.planned(bind(self.shapes, dict(zip(self.shapes, key, strict=True))))
                if len(self.plans) > KEPT:
                    del self.plans[next(iter(self.plans))]
            if sized is not self.selected:
                self.select(sized)
            return super().__call__(params, inputs)

    def key(self, arguments: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple([arguments[name].shape for name in self.shapes])

    def planned(self, sizes: dict[str, int]) -> Sized:
        """Plan the memory for these sizes."""
        offsets, arena = self.arena_plan.offsets(sizes)
        results = [
            ResultBuffer(name, slot, tuple(int(substitute(n, sizes)) for n in shape), kind)
            for name, slot, shape, kind in self.layout.results
        ]
        return Sized(sizes, offsets, arena, results)

    def select(self, sized: Sized) -> None:
        """Write sizes and addresses into the table."""
        if sized.arena > self.arena.nbytes:
            self.arena = aligned(sized.arena)
            self.table[ARENA] = self.arena.ctypes.data
        base = int(self.table[ARENA])
        for name, slot in self.layout.sizes.items():
            self.table[slot] = sized.sizes[name]
        for slot, offset in sized.offsets:
            self.table[slot] = base + offset
        self.results, self.selected = sized.results, sized
        self.short = None  # the next run is timed, as its length depends on the sizes

    def memory_of(self, sizes: Mapping[str, int]) -> int:
        """Return the bytes of arena and results for these sizes."""
        sized = self.planned(dict(sizes))
        return sized.arena + sum(r.size for r in sized.results)

    def repeated(self, params: Mapping[str, Any], inputs: Mapping[str, Any], otherwise: Repeated) -> Repeated:
        """Generate a fast call for the sizes of these inputs; others take the way that selects sizes."""
        with self.choosing:
            if self.selected is None or self.plans.get(self.key({**params, **inputs})) is not self.selected:
                return otherwise
            return super().repeated(params, inputs, otherwise)
