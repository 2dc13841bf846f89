"""Summary table of a compiled model: output, parameters and operations of each layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mithril.axes import flops
from mithril.base import is_static, numel, visible
from mithril.ir import Graph, Value
from mithril.runtime.compiled_protocol import Compiled
from mithril.runtime.tables import columns, format_si


def summarize(model: Compiled, graph: Graph) -> str:
    """Return a table of layers with output shapes, parameters and floating-point operations, and the totals."""
    rows = layer_rows(graph)
    table = columns(
        ["layer", "output", "parameters", "flops"],
        [[r.path, r.output, format_si(r.params), format_si(r.flops)] for r in rows],
    )
    params = sum(r.params for r in rows)
    size = sum(_count(i.type.shape) * i.type.dtype.itemsize for i in graph.with_role("param"))
    flops = sum(r.flops for r in rows)
    title = f"{visible(model.name)} on {model.backend.name}"
    totals = [
        f"{title}: {params:,} parameters ({format_si(size)}B), {format_si(flops)} flops",
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
        row.flops += _typical_size(flops(node))
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
    from mithril.base import substitute, symbols

    return int(substitute(size, {s.name: max(s.low, 1) for s in symbols(size)}))
