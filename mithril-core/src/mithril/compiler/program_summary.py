"""Summary table of a compiled model: output, parameters and operations of each layer."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mithril.compiler.program import Compiled, Compiler, Program, ProgramKey, ProgramKind
from mithril.compiler.sparse_inputs import dense_shapes
from mithril.graph import (
    Decisions,
    Graph,
    TensorType,
    Value,
    bind,
    counted_flops,
    is_static,
    numel,
    substitute_sizes,
    visible,
)
from mithril.passes import PipelineReport
from mithril.system import notebook


def format_si(number: float) -> str:
    """Format a number with an SI prefix: 1234567 as 1.23M."""
    if number < 1000:
        return str(int(number))
    for unit in ("k", "M", "G"):
        number /= 1000
        if number < 999.5:  # more is 1e+03 with three digits
            return f"{number:.3g}{unit}"
    return f"{number / 1000:.3g}T"


def format_flops(count: float, unknown: Collection[str]) -> str:
    """Format floating-point operations, to which operations of unknown ones add."""
    if not unknown:
        return format_si(count)
    return f"at least {format_si(count)}" if count else "unknown"


def unknown_flops(unknown: Collection[str]) -> list[str]:
    """Return a line with the operations of unknown flops, and the remedy, if there are any."""
    return [f"unknown flops: {', '.join(sorted(unknown))} (declare flops= with the operation)"] if unknown else []


def columns(head: Sequence[str], rows: Iterable[Sequence[str]], width: int = 100) -> list[str]:
    """Format a table as aligned columns; the first one is truncated if the terminal is narrow."""
    table = [list(head), *[list(map(visible, r)) for r in rows]]
    widths = [max(len(r[k]) for r in table) for k in range(len(head))]
    spare = width - sum(widths[1:]) - 2 * (len(head) - 1)
    widths[0] = min(widths[0], max(spare, 16))
    lines = []
    for row in table:
        first = row[0] if len(row[0]) <= widths[0] else "…" + row[0][-(widths[0] - 1) :]
        cells = [
            first.ljust(widths[0]),
            *(c.ljust(w) if k == 0 else c.rjust(w) for k, (c, w) in enumerate(zip(row[1:], widths[1:], strict=True))),
        ]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "-" * min(width, sum(widths) + 2 * (len(head) - 1)))
    return lines


def summarize(model: Compiled, graph: Graph) -> str:
    """Return a table of layers with output shapes, parameters and floating-point operations, and the totals."""
    rows = layer_rows(graph)
    table = columns(
        ["layer", "output", "parameters", "flops"],
        [[r.path, r.output, format_si(r.params), format_flops(r.flops, r.unknown)] for r in rows],
    )
    params = sum(r.params for r in rows)
    size = sum(_count(i.type.shape) * i.type.dtype.itemsize for i in graph.with_role("param"))
    unknown = {name for r in rows for name in r.unknown}
    flops = format_flops(sum(r.flops for r in rows), unknown)
    title = f"{visible(model.name)} on {model.backend.name}"
    totals = [
        f"{title}: {params:,} parameters ({format_si(size)}B), {flops} flops",
        *unknown_flops(unknown),
        f"programs: {len(model.programs)}",
    ]
    return "\n".join([*table, *totals])


class Row:
    """The totals of one layer."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.output = ""
        self.params = 0
        self.flops = 0
        self.unknown: set[str] = set()  # operations of which nothing says their flops


def layer_results(graph: Graph) -> dict[str, Value]:
    """Return the result of each layer by path: of the values that the graph uses outside of it, the largest one."""
    paths = {id(value): node.origin.path for node in graph.nodes for value in node.results}
    results: dict[str, Value] = {}

    def leave(value: Value, reader: str) -> None:
        parts = paths.get(id(value), "").split(".")
        for k in range(len(parts) + 1):
            path = ".".join(parts[:k])
            if path == reader or reader.startswith(f"{path}.") or (not path and reader):
                continue
            if path not in results or _count(results[path].shape) <= _count(value.shape):
                results[path] = value

    for node in graph.nodes:
        for value in (v for v in node.operands if v is not None):
            leave(value, node.origin.path or "(model)")
    for value in reversed(graph.outputs):
        leave(value, "")
    return results


def layer_rows(graph: Graph) -> list[Row]:
    """Return one row per layer path in order of execution; symbolic sizes count as 1."""
    rows: dict[str, Row] = {}
    results = layer_results(graph)
    for node in graph.nodes:
        if node.is_constant:
            continue
        row = rows.setdefault(node.origin.path or "(model)", Row(node.origin.path or "(model)"))
        row.output = str(results.get(node.origin.path, node.result).type)
        operations, unknown = counted_flops(node)
        row.flops += _typical_size(operations)
        row.unknown.update(unknown)
    for i in graph.with_role("param"):
        path = i.name.rpartition(".")[0] or "(model)"
        row = rows.setdefault(path, Row(path))
        row.params += _count(i.type.shape)
    return list(rows.values())


def _count(shape: Sequence[Any]) -> int:
    return _typical_size(numel(tuple(shape)))


def _typical_size(size: Any) -> int:
    if is_static((size,)):
        return int(size)
    from mithril.graph import substitute, symbols

    return int(substitute(size, {s.name: max(s.low, 1) for s in symbols(size)}))


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


def concrete(program: Program, shapes: Mapping[str, tuple[int, ...]], compiler: Compiler) -> Graph:
    """Return the graph of a program at the sizes of its inputs."""
    graph: Graph = program.executable.graph
    shapes = {**shapes, **dense_shapes(program.request.stored, program.types, shapes)}  # type: ignore[dict-item]
    static = all(v.type.is_static for node in graph.nodes for v in node.results)
    if static and all(shapes.get(name, t.shape) == t.shape for name, t in program.request.types):
        return graph
    if program.weights is not None:  # its parameters are named in this graph alone
        inputs = program.types
        return substitute_sizes(graph, bind({n: t.shape for n, t in inputs.items()}, {n: shapes[n] for n in inputs}))
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
