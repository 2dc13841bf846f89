"""``memory_report()``: bytes of parameters, state, activations and gradients per layer, and the plan's peak."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mithril.backend.memory_plan import MemoryPlan, human, nbytes, plan
from mithril.base.dims import symbols
from mithril.base.errors import InputError
from mithril.ir import Graph
from mithril.tools.program_summary import columns

if TYPE_CHECKING:
    from mithril.runtime.compiled_model import CompiledModel


@dataclass(slots=True)
class LayerMemory:
    """Bytes that belong to one layer. ``activations`` are what its operations make, before any reuse."""

    layer: str
    parameters: int = 0
    state: int = 0
    activations: int = 0
    gradients: int = 0


@dataclass
class MemoryReport:
    """Print it for the table."""

    layers: list[LayerMemory]
    inputs: int
    parameters: int
    state: int
    gradients: int
    plan: MemoryPlan
    largest: list[tuple[str, int]] = field(default_factory=list)

    @property
    def workspace(self) -> int:
        """The arena that all intermediate values share."""
        return self.plan.size

    @property
    def peak(self) -> int:
        """Everything alive at the worst moment of a call."""
        return self.inputs + self.parameters + self.state + self.workspace

    def __str__(self) -> str:
        head = ["layer", "parameters", "state", "activations", "gradients"]
        rows = [
            [row.layer, *(human(n) if n else "-" for n in (row.parameters, row.state, row.activations, row.gradients))]
            for row in self.layers
        ]
        saved = self.plan.total / self.plan.size if self.plan.size else 1.0
        values = (
            f"intermediate values {human(self.plan.total)}, planned into {human(self.workspace)} ({saved:.1f}x less; "
            f"{human(self.plan.peak)} alive at once, {self.plan.in_place} results in place)"
        )
        return "\n".join(
            [
                *columns(head, rows),
                f"inputs {human(self.inputs)}, parameters {human(self.parameters)}, state {human(self.state)}",
                values,
                "largest: " + ", ".join(f"'{name}' {human(size)}" for name, size in self.largest),
                f"peak {human(self.peak)}",
            ]
        )


def memory_report(model: CompiledModel, inputs: Mapping[str, Any] | None = None) -> MemoryReport:
    """Of the newest program, as the backend runs it."""
    if not model.programs:
        raise InputError(
            "no program has been made yet, so its memory is not known",
            hint="give shapes= to ml.compile, or run the model once",
        )
    program = model.programs[-1]
    graph = program.executable.graph
    unknown = symbols(*(d for i in graph.inputs for d in i.type.shape))
    if unknown:
        shapes = {n: _shape(x) for n, x in (inputs or {}).items()}
        if missing := [n for n, t in program.types.items() if not t.is_static and n not in shapes]:
            raise InputError(
                f"the size {unknown[0].name} of input '{missing[0]}' is not known",
                hint=f"memory_report({{'{missing[0]}': [sizes] or an array}})",
            )
        graph = model.concrete(program, shapes)
    return report(graph)


def _shape(x: Any) -> tuple[int, ...]:
    found: Collection[int] = getattr(x, "shape", x)
    return tuple(found)


def report(graph: Graph) -> MemoryReport:
    """The report of a static graph."""
    rows: dict[str, LayerMemory] = {}

    def row(path: str) -> LayerMemory:
        return rows.setdefault(path or "(model)", LayerMemory(path or "(model)"))

    for node in graph.nodes:
        if node.op.name != "constant":
            row(node.origin.path).activations += sum(nbytes(v.type) for v in node.results)
    totals = {"param": 0, "state": 0, "input": 0, "constant": 0}
    for i in graph.inputs:
        size = nbytes(i.type)
        totals[i.role] += size
        if i.role == "param":
            row(i.name.rpartition(".")[0]).parameters += size
        elif i.role == "state":
            row(i.name.removeprefix("state/").rpartition(".")[0]).state += size
    gradients = 0
    for name, value in zip(graph.output_names, graph.outputs, strict=True):
        if name.startswith("grad/"):
            size = nbytes(value.type)
            gradients += size
            row(name.removeprefix("grad/").rpartition(".")[0]).gradients += size
    made = plan(graph)
    values = {v.name: nbytes(v.type) for n in graph.nodes for v in n.results}
    values |= {i.name: nbytes(i.type) for i in graph.inputs}
    return MemoryReport(
        list(rows.values()),
        totals["input"],
        totals["param"] + totals["constant"],
        totals["state"],
        gradients,
        made,
        sorted(values.items(), key=lambda pair: -pair[1])[:5],
    )
