"""``model.summary()``: a plain text table by depth."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mithril.compiler import format_flops, format_si, layer_results, unknown_flops
from mithril.graph import (
    Dim,
    Graph,
    ModelError,
    TensorType,
    Value,
    closest,
    counted_flops,
    dtype as as_dtype,
    is_static,
    numel,
    visible,
)
from mithril.models.language.flatten import FlatModel, flatten
from mithril.models.language.layer import Layer
from mithril.models.language.trace import trace_model
from mithril.models.language.trace_context import join_path

HEAD = ("layer", "result", "parameters", "flops", "memory")


@dataclass(slots=True)
class Row:
    """The totals of a layer, including the layers inside it."""

    path: str
    depth: int
    title: str = ""
    result: str = ""
    params: int = 0
    flops: int = 0
    memory: int = 0
    unknown: set[str] = field(default_factory=set)  # operations of which nothing says their flops

    def cells(self) -> list[str]:
        name = "  " * self.depth + (self.path.rpartition(".")[2] or "model")
        title = f"{name} ({self.title})" if self.title else name
        operations = format_flops(self.flops, self.unknown)
        return [title, self.result, format_si(self.params), operations, f"{format_si(self.memory)}B"]


def _indented(path: str, is_one_layer: bool) -> str:
    depth = path.count(".") + (is_one_layer and path != "")
    return "  " * depth + (path.rpartition(".")[2] or "model")


def summarize(
    model: Layer,
    shapes: Mapping[str, Any] | None = None,
    types: Mapping[str, Any] | None = None,
    width: int | None = None,
) -> str:
    """Return the table of ``Model.summary``; unless all input shapes are known, only names and kinds of layers."""
    flat = flatten(model, inference=True)
    columns_available = width or shutil.get_terminal_size((100, 24)).columns
    titles = {
        join_path(call.path, path): type(layer).__name__
        for call in flat.layer_calls
        if call.needed
        for path, layer in (("", call.layer), *call.layer.walk())
    }
    input_types = _types(flat, shapes or {}, types or {})
    if any(d.name not in input_types and d.required for d in flat.inputs):
        missing = ", ".join(d.name for d in flat.inputs if d.name not in input_types)
        rows = [[_indented(path, "" in titles), title] for path, title in titles.items()]
        return "\n".join(
            [
                *columns(("layer", "kind"), rows, columns_available),
                f"pass the shapes of {visible(missing)} to see sizes: summary(shapes=...)",
            ]
        )
    results: dict[str, Any] = {}
    graph = trace_model(flat, input_types, results=results)
    table = _with_every_layer(layer_rows(graph, titles), titles)
    for row in table:
        if isinstance(result := results.get(row.path), Value):  # a layer may also return a number
            row.result = str(result.type)
    rows = [row.cells() for row in table]
    params = sum(_typical_size(numel(i.type.shape)) for i in graph.with_role("param"))
    size = sum(_typical_size(numel(i.type.shape)) * i.type.dtype.itemsize for i in graph.with_role("param"))
    counts = [counted_flops(node) for node in graph.nodes]
    unknown = {name for _, names in counts for name in names}
    total = format_flops(sum(_typical_size(count) for count, _ in counts), unknown)
    return "\n".join(
        [
            *columns(HEAD, rows, columns_available),
            f"{params:,} parameters ({format_si(size)}B), {total} operations",
            *unknown_flops(unknown),
        ]
    )


def _types(flat: FlatModel, shapes: Mapping[str, Any], types: Mapping[str, Any]) -> dict[str, TensorType]:
    names = [*(d.name for d in flat.inputs), *flat.unused_inputs]
    for name in [*shapes, *types]:
        if name not in names:
            suggestions = closest(name, names, 1)
            raise ModelError(
                f"the model has no input '{name}'",
                facts=[f"inputs: {', '.join(names)}"],
                hint=f"did you mean '{suggestions[0]}'?" if suggestions else None,
            )
    input_types = {}
    for decl in flat.inputs:
        shape = shapes.get(decl.name, decl.shape)
        if shape is not None:
            kind = as_dtype(types.get(decl.name) or decl.dtype or "float32")
            input_types[decl.name] = TensorType(kind, tuple(_size(decl.name, k, s) for k, s in enumerate(shape)))
    return input_types


def _size(name: str, axis: int, size: Any) -> Any:
    return Dim(f"{name}_{axis}") if size is None else Dim(size) if isinstance(size, str) else size


def layer_rows(graph: Graph, titles: Mapping[str, str]) -> list[Row]:
    """Return one row per layer and enclosing model, in execution order; a symbolic size counts as its lower bound."""
    rows: dict[str, Row] = {"": Row("", 0)}
    results = layer_results(graph)
    for node in graph.nodes:
        if node.is_constant:
            continue
        operations, unknown = counted_flops(node)
        for path in _prefixes(node.origin.path):
            row = rows.setdefault(path, Row(path, path.count(".") + 1, titles.get(path, "")))
            row.flops += _typical_size(operations)
            row.unknown.update(unknown)
            row.result = str(results[path].type) if path in results else f"{node.result.type}"
            row.memory += sum(_typical_size(numel(v.shape)) * v.dtype.itemsize for v in node.results)
    for i in graph.with_role("param"):
        count = _typical_size(numel(i.type.shape))
        for path in _prefixes(i.name.rpartition(".")[0]):
            rows.setdefault(path, Row(path, path.count(".") + 1, titles.get(path, ""))).params += count
    return list(rows.values())


def _with_every_layer(rows: list[Row], titles: Mapping[str, str]) -> list[Row]:
    """Return the rows in the order of the layers, with rows of layers without operations, such as an identity."""
    by_path = {row.path: row for row in rows}
    ordered: dict[str, Row] = {}
    for layer, title in titles.items():
        for path in _prefixes(layer):
            ordered.setdefault(path, by_path.get(path) or Row(path, path.count(".") + 1, title))
        ordered.update((path, row) for path, row in by_path.items() if layer and path.startswith(f"{layer}."))
    return list((ordered | by_path).values())


def _prefixes(path: str) -> list[str]:
    """Return the prefixes of a dotted path: "", "a", "a.b" and "a.b.c" for ``a.b.c``."""
    parts = path.split(".") if path else []
    return [".".join(parts[:k]) for k in range(len(parts) + 1)]


def _typical_size(size: Any) -> int:
    if is_static((size,)):
        return int(size)
    from mithril.graph import substitute, symbols

    return int(substitute(size, {s.name: max(s.low, 1) for s in symbols(size)}))


def columns(head: tuple[str, ...], rows: list[list[str]], width: int) -> list[str]:
    """Return the lines of a table; to fit ``width``, drop the last columns, then truncate the first one."""
    table = [list(head), *[list(map(visible, r)) for r in rows]]
    widths = [max(len(r[k]) for r in table) for k in range(len(head))]
    while len(widths) > 2 and sum(widths) + 2 * (len(widths) - 1) > width:
        widths.pop()
    spare = width - sum(widths[1:]) - 2 * (len(widths) - 1)
    widths[0] = max(min(widths[0], spare), 12)
    lines = []
    for row in table:
        first = row[0] if len(row[0]) <= widths[0] else row[0][: widths[0] - 1] + "…"
        cells = [first.ljust(widths[0])]
        cells += [
            c.ljust(w) if k == 0 else c.rjust(w) for k, (c, w) in enumerate(zip(row[1:], widths[1:], strict=False))
        ]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "-" * min(width, sum(widths) + 2 * (len(widths) - 1)))
    return lines
