"""Read-only queries of a compiled model: shapes, types, graphs, decisions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from mithril.base import Decisions, TensorType, visible
from mithril.ir import Graph
from mithril.passes import PipelineReport
from mithril.runtime.program import Program, ProgramKey, ProgramKind
from mithril.system import notebook, package_content


@dataclass(frozen=True, slots=True)
class PluginRecord:
    """A plugin that was installed when a model was compiled: present or absent, with the reasons."""

    name: str
    distribution: str
    version: str
    module: str
    state: str  # "present" or "absent"
    problems: tuple[str, ...]  # why it, or a part of it, was not in use

    @property
    def content(self) -> str:
        """A hash of the code of the plugin's package."""
        return package_content(self.module.partition(".")[0])

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}: {'; '.join((self.state, *self.problems))}"


class Lowering(Protocol):
    """The interface for lowering the graph of a request again."""

    def lowered(self, request: ProgramKey) -> Graph: ...


def named_types(interface: Graph) -> dict[str, TensorType]:
    """Return the types of inputs, outputs and intermediate values with user-defined names."""
    types = {i.name: i.type for i in interface.arguments}
    for node in interface.nodes:
        stem = node.op.name.rpartition(".")[2]
        types.update((v.name, v.type) for v in node.results if v.name.rstrip("0123456789_") != stem)
    types.update((r.name, r.type) for r in interface.results if r.role != "state")
    return types


def request_for(programs: tuple[Program, ...], gradients: bool) -> ProgramKey:
    """Return the request of the latest program, changed to gradients of all outputs or none."""
    newest = programs[-1]
    outputs = tuple(n for n, t in newest.interface.outputs.items() if t.dtype.is_float)
    return ProgramKey(newest.request.types, ProgramKind(True, outputs) if gradients else ProgramKind())


def concrete(program: Program, shapes: Mapping[str, tuple[int, ...]], compiler: Lowering) -> Graph:
    """Return the graph of a program at the sizes of its inputs."""
    graph: Graph = program.executable.graph
    static = all(v.type.is_static for node in graph.nodes for v in node.results)
    if static and all(shapes.get(name, t.shape) == t.shape for name, t in program.request.types):
        return graph
    types = tuple((name, TensorType(t.dtype, shapes.get(name, t.shape))) for name, t in program.request.types)
    return compiler.lowered(replace(program.request, types=types))


class Explanation(str):
    """A text, which notebooks show as tables."""

    html: str

    def _repr_html_(self) -> str:
        return self.html


def explanation(decisions: Decisions, programs: Iterable[Program]) -> Explanation:
    """Return all decisions, and the report of passes for each program."""
    parts, tables = [str(decisions)], [decision_table(decisions) or notebook.paragraphs([str(decisions)])]
    for program in programs:
        types, kind = ", ".join(f"{n}: {t}" for n, t in program.request.types), program.request.kind
        purpose = f", gradients of {', '.join(kind.of)}" if kind.of else ", training" if kind.training else ""
        title = visible(f"program for {types}{purpose}")
        parts.append(f"{title}:\n{program.report}" if program.report is not None else title)
        tables.append(notebook.folded(title, _pass_table(program.report)))
    text = Explanation("\n\n".join(parts))
    text.html = "".join(tables)
    return text


def decision_table(decisions: Decisions) -> str:
    """Return the decisions as HTML, or "" if there are none."""
    rows = [(d.kind, d.message, d.where) for d in decisions]
    return notebook.table(("kind", "decision", "place"), rows) if rows else ""


def _pass_table(report: PipelineReport | None) -> str:
    records = report.records if report is not None else []
    slowest = max((r.seconds for r in records), default=0.0) or 1.0
    rows = [(r.name, f"{r.before} -> {r.after}" if r.changed else "", f"{r.seconds * 1e3:.2f}") for r in records]
    return notebook.table(("pass", "nodes", "ms"), rows, [r.seconds / slowest for r in records])


def title(kind: ProgramKind) -> str:
    """Return the title of a program in displays."""
    mode = "training" if kind.training else "inference"
    return f"gradient program ({mode}) of {', '.join(kind.of)}" if kind.of else f"program ({mode})"
