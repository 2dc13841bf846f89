"""Memory of a program: one figure for reports, limits and remedies.

The figure is exact if the backend provides it (a planned arena, XLA's analysis), otherwise an estimate from the
lifetimes of values, with the views and scratch memory that the backend declares.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mithril import ops
from mithril.backend import Backend, lifetimes, nbytes
from mithril.graph import Graph, Input, Node, Value, is_recomputed, symbols

SOURCES = {
    "arena": "exact: one planned arena",
    "arena and NumPy": "one planned arena without the memory of operations that NumPy runs: {error}",
    "XLA": "exact: XLA's analysis of the compiled program",
    "replay": "a replay of the order of evaluation, {error}",
    "estimate": "an estimate, {error}; ml.run_benchmark measures",
}


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of a program. ``workspace`` is the peak of intermediate values and results."""

    inputs: int
    parameters: int  # including constants
    state: int
    workspace: int
    source: str  # "arena", "arena and NumPy", "XLA", "replay" or "estimate"
    error: tuple[float, float] | None = None  # range of estimate / measurement - 1 on small networks

    @property
    def outside(self) -> int:
        """Bytes of inputs, parameters and state, which the caller owns."""
        return self.inputs + self.parameters + self.state

    @property
    def peak(self) -> int:
        """Peak memory of a call, in bytes."""
        return self.outside + self.workspace

    @property
    def exact(self) -> bool:
        return self.source in ("arena", "XLA")

    @property
    def label(self) -> str:
        """Source and error of the figure."""
        return SOURCES[self.source].format(error=_error_range(self.error))


def _error_range(error: tuple[float, float] | None) -> str:
    if error is None:
        return "whose error was not measured"
    low, high = error
    return f"{-low:.0%} under to {high:.0%} over measurements of small networks"


class ProgramMemory:
    """The memory of one program on its backend, used by all reports, limits and drawings."""

    __slots__ = ("_figures", "backend", "executable")

    def __init__(self, backend: Backend, executable: Any) -> None:
        self.backend = backend
        self.executable = executable
        self._figures: dict[tuple[tuple[str, int], ...], MemoryUse] = {}

    @property
    def graph(self) -> Graph:
        return self.executable.graph  # type: ignore[no-any-return]

    def at(self, sizes: Mapping[str, int]) -> MemoryUse:
        """Return the memory for these sizes, which is planned once; weights can be packed at a later call."""
        key = *sorted(sizes.items()), *sorted(self.backend.weight_bytes(self.executable).items())
        if key not in self._figures:
            self._figures[key] = memory_use(self.graph, self.backend, sizes, self.executable)
        return self._figures[key]

    def allocated(self, sizes: Mapping[str, int]) -> dict[Node, int]:
        """Return the bytes of the results of each operation, without reuse of memory."""
        return allocated_bytes(self.graph, self.backend, sizes)


def memory_use(
    graph: Graph, backend: Backend, sizes: Mapping[str, int] | None = None, executable: Any = None
) -> MemoryUse:
    """Return the memory of a decomposed graph; exact if the executable is passed and the backend supports it."""
    totals = dict.fromkeys(("input", "param", "constant", "state", "cotangent"), 0)
    for i, size in input_bytes(graph, backend, sizes, executable).items():
        totals[i.role] += size
    exact = backend.exact_memory(executable, sizes or {}) if executable is not None else None
    claims = backend.capabilities
    workspace, source = exact if exact is not None else (alive(graph, backend, sizes), "estimate")
    return MemoryUse(
        totals["input"] + totals["cotangent"],
        totals["param"] + totals["constant"],
        totals["state"],
        workspace,
        source,
        None if source == "estimate" and claims.knows_memory else claims.estimate_error,
    )


def input_bytes(
    graph: Graph, backend: Backend, sizes: Mapping[str, int] | None = None, executable: Any = None
) -> dict[Input, int]:
    """Return the bytes of each input: of its type, unless the program has it in another form; of used constants."""
    other = backend.weight_bytes(executable) if executable is not None else {}
    used = [i for i in graph.inputs if i.role != "constant" or i.value in graph.users or i.value in graph.outputs]
    return {i: other[i.name] if i.name in other else nbytes(i.type, sizes) for i in used}


def alive(graph: Graph, backend: Backend, sizes: Mapping[str, int] | None = None) -> int:
    """Return the peak of values, results and scratch memory over all steps, in bytes."""
    # Values live until the end of a call, so that no buffer takes the place of another. A program with checkpoints
    # waits for each operation instead.
    if backend.capabilities.is_lazy and not any(map(is_recomputed, graph.nodes)):
        buffers = lifetimes(graph, sizes, in_place=backend.overwrites, views=views_of(graph, backend).__contains__)
        return sum(b.size for b in buffers) + sum(_working(node, backend, sizes) for node in graph.nodes)
    steps = len(graph.nodes)
    change = [0] * (steps + 2)
    views = views_of(graph, backend)
    for buffer in lifetimes(graph, sizes, in_place=backend.overwrites, views=views.__contains__):
        change[buffer.start] += buffer.size
        change[buffer.end + 1] -= buffer.size
    peak = now = 0
    for step in range(steps + 1):
        now += change[step]
        peak = max(peak, now + (_working(graph.nodes[step], backend, sizes) if step < steps else 0))
    return peak


def allocated_bytes(graph: Graph, backend: Backend, sizes: Mapping[str, int] | None = None) -> dict[Node, int]:
    """Return the bytes of the results of each operation, without reuse of memory: 0 for views and constants."""
    free = views_of(graph, backend)
    return {
        node: 0 if node.is_constant or node in free else sum(nbytes(v.type, sizes) for v in node.results)
        for node in graph.nodes
    }


def views_of(graph: Graph, backend: Backend) -> set[Node]:
    """Return the nodes that are views, excluding reshapes of non-contiguous views."""
    views: set[Node] = set()
    strided: set[Value | None] = set()
    for node in graph.nodes:
        if not node.operands or not backend.is_view(node):
            continue
        keeps_order = node.op in (ops.reshape, ops.barrier)
        disordered = strided.intersection(node.operands)
        # A reshape of a transposed or strided view copies, as its elements are not in order.
        if node.op is ops.reshape and disordered:
            continue
        views.add(node)
        if disordered or not keeps_order:
            strided.update(node.results)
    return views


def _working(node: Node, backend: Backend, sizes: Mapping[str, int] | None) -> int:
    """Return the scratch memory of an operation in bytes; for control flow, that of its regions."""
    bodies = [alive(region, backend, sizes) for region in node.regions]
    return max([backend.workspace(node, sizes or {}), *bodies])


def largest_sizes(graph: Graph) -> Mapping[str, int] | None:
    """Return the upper bounds of symbolic sizes, or None if a size is unbounded."""
    free_symbols = symbols(*(d for i in graph.inputs for d in i.type.shape))
    if any(s.high is None for s in free_symbols):
        return None
    return {s.name: int(s.high) for s in free_symbols if s.high is not None}
