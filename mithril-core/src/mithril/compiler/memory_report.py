"""``memory_report()``: bytes of parameters, state, activations and gradients per layer, and peak memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mithril.backend import Backend, HeldWeights, format_bytes, held_weights, nbytes
from mithril.compiler.memory_usage import MemoryUse, allocated_bytes, input_bytes, memory_use
from mithril.compiler.program import Compiled
from mithril.compiler.program_summary import columns
from mithril.graph import Graph, InputError, bind, symbols, visible
from mithril.system import notebook


@dataclass(slots=True)
class LayerMemory:
    """Bytes of one layer. ``activations`` counts the results of its operations without reuse of memory."""

    layer: str
    parameters: int = 0
    state: int = 0
    activations: int = 0
    gradients: int = 0


@dataclass
class MemoryReport:
    """A printable memory report of a program, with one row per layer."""

    layers: list[LayerMemory]
    inputs: int
    parameters: int
    state: int
    gradients: int
    use: MemoryUse
    values: int  # bytes of all intermediate values without reuse
    largest: list[tuple[str, int]] = field(default_factory=list)
    weights: HeldWeights | None = None  # of a program in which parameters are embedded

    @property
    def workspace(self) -> int:
        """Peak of intermediate values and results, in bytes."""
        return self.use.workspace

    @property
    def peak(self) -> int:
        """Peak memory of a call: live buffers at the high-water mark, in bytes, with all weights that are held."""
        weights = self.use.parameters if self.weights is None else self.weights.in_memory
        return self.use.inputs + weights + self.use.state + self.use.workspace

    def _table(self) -> tuple[list[str], list[list[str]]]:
        rows = [[row.layer, *(format_bytes(n) if n else "-" for n in _sizes(row))] for row in self.layers]
        return ["layer", "parameters", "state", "activations", "gradients"], rows

    def _repr_html_(self) -> str:
        head, rows = self._table()
        largest = max((sum(_sizes(row)) for row in self.layers), default=0) or 1
        bars = notebook.table(head, rows, [sum(_sizes(row)) / largest for row in self.layers])
        return bars + notebook.paragraphs(self._totals())

    def __str__(self) -> str:
        return "\n".join([*columns(*self._table()), *self._totals()])

    def _totals(self) -> list[str]:
        saved = self.values / self.workspace if self.workspace else 1.0
        total, peak = format_bytes(self.values), format_bytes(self.workspace)
        values = f"intermediate values and results {total}, at once {peak} ({saved:.1f}x less)"
        return [
            (
                f"inputs {format_bytes(self.inputs)}, parameters {format_bytes(self.parameters)}, "
                f"state {format_bytes(self.state)}"
            ),
            values,
            *([str(self.weights)] if self.weights is not None else []),
            "largest: " + ", ".join(f"'{visible(name)}' {format_bytes(size)}" for name, size in self.largest),
            f"peak {format_bytes(self.peak)}, {self.use.label}",
        ]


def _sizes(row: LayerMemory) -> tuple[int, ...]:
    return row.parameters, row.state, row.activations, row.gradients


def memory_report(
    model: Compiled, inputs: Mapping[str, Any] | None = None, *, gradients: bool | None = None
) -> MemoryReport:
    """Report on the latest program, or on the latest one with (True) or without (False) ``gradients``."""
    program = model.program_for(gradients) if gradients is not None else next(reversed(model.programs), None)
    if program is None:
        raise InputError(
            "no program has been made yet, so its memory is not known",
            hint="pass shapes= to ml.compile, or run the model once",
        )
    graph = program.executable.graph
    shapes = {**model.last_shapes, **{n: _shape(x) for n, x in (inputs or {}).items()}}
    unknown = symbols(*(d for i in graph.inputs for d in i.type.shape))
    sizes: dict[str, int] = {}
    if unknown:
        if missing := [n for n, t in program.types.items() if not t.is_static and n not in shapes]:
            raise InputError(
                f"the size {unknown[0].name} of input '{missing[0]}' is unknown",
                hint=f"memory_report({{'{missing[0]}': [sizes] or an array}})",
            )
        sizes = bind({n: t.shape for n, t in program.types.items()}, {n: shapes[n] for n in program.types})
    elif any(n in (inputs or {}) and shapes[n] != t.shape for n, t in program.types.items()):
        graph = model.concrete(program, shapes)
        return report(graph, model.backend, memory_use(graph, model.backend), sizes)
    result = report(graph, model.backend, program.memory.at(sizes), sizes, program.executable)
    if program.request.embeds:
        result.weights = _held(model, program.executable, result.parameters)
    elif program.weights is not None:
        result.weights = held_weights([*model.held_params.values(), *program.weights.values()])
    return result


def _held(model: Compiled, executable: Any, n: int) -> HeldWeights:
    """Return the weights of a program with embedded parameters, whose constants have n bytes."""
    arrays, embedded = model.backend.embedded_weights(executable, n)
    weights = held_weights([*model.held_params.values(), *arrays])
    return weights.with_copies(embedded) if embedded else weights


def _shape(x: Any) -> tuple[int, ...]:
    sizes = getattr(x, "shape", x)
    if not isinstance(sizes, Sequence) or not all(isinstance(n, (int, np.integer)) and n >= 0 for n in sizes):
        raise InputError(f"memory_report: expected an array or a list of sizes, got {x!r:.60}")
    return tuple(map(int, sizes))


def report(
    graph: Graph, backend: Backend, use: MemoryUse, sizes: Mapping[str, int], executable: Any = None
) -> MemoryReport:
    """Return the report of a lowered graph, with numbers for its symbolic sizes."""
    rows: dict[str, LayerMemory] = {}

    def row(path: str) -> LayerMemory:
        return rows.setdefault(path or "(model)", LayerMemory(path or "(model)"))

    allocated = allocated_bytes(graph, backend, sizes)
    for node, size in allocated.items():
        if size:
            row(node.origin.path).activations += size
    inputs = input_bytes(graph, backend, sizes, executable)
    for i, size in inputs.items():
        if i.role == "param":
            row(i.name.rpartition(".")[0]).parameters += size
        elif i.role == "state":
            row(i.name.rpartition(".")[0]).state += size
    gradients = 0
    for r in graph.results_of("gradient"):
        size = nbytes(r.type, sizes)
        gradients += size
        row(r.of.rpartition(".")[0]).gradients += size
    values = {v.name: nbytes(v.type, sizes) for n, size in allocated.items() if size for v in n.results}
    values |= {i.name: size for i, size in inputs.items()}
    return MemoryReport(
        list(rows.values()),
        use.inputs,
        use.parameters,
        use.state,
        gradients,
        use,
        sum(allocated.values()),
        sorted(values.items(), key=lambda pair: -pair[1])[:5],
    )
