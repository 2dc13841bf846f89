"""Export of graphs to JSON and DOT."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mithril.backend import format_bytes
from mithril.graph import Graph, Node, Value, attribute_text, visible

LABEL = 60  # characters of attributes on a node


def to_json(graph: Graph) -> str:
    """Return a graph as JSON: inputs, nodes and outputs with types, attributes, layer paths and source lines."""
    return json.dumps(graph_data(graph), indent=1)


def graph_data(graph: Graph) -> dict[str, Any]:
    """Return the data of ``to_json`` as dicts and lists."""
    names = _names(graph)
    return {
        "name": graph.name,
        "inputs": [
            {"name": names[i.value], "role": i.role, "dtype": i.type.dtype.name, "shape": _shape(i.value)}
            for i in graph.inputs
        ],
        "nodes": [_node(n, names) for n in graph.nodes],
        "outputs": [
            {"name": name, "value": names[v]} for name, v in zip(graph.output_names, graph.outputs, strict=True)
        ],
    }


def _names(graph: Graph) -> dict[Value, str]:
    """Return a distinct name for every value."""
    counts: dict[str, int] = {}
    out: dict[Value, str] = {}
    for value in [*(i.value for i in graph.inputs), *(v for n in graph.nodes for v in n.results)]:
        counts[value.name] = counts.get(value.name, 0) + 1
        out[value] = value.name if counts[value.name] == 1 else f"{value.name}#{counts[value.name]}"
    return out


def _shape(value: Value) -> list[int | str]:
    return [d if isinstance(d, int) else str(d) for d in value.shape]


def _node(node: Node, names: Mapping[Value, str]) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "op": node.op.name,
        "operands": [None if v is None else names[v] for v in node.operands],
        "results": [{"name": names[v], "dtype": v.dtype.name, "shape": _shape(v)} for v in node.results],
        "attributes": {name: attribute_text(value) for name, value in node.attributes.items()},
    }
    if node.origin.path or node.origin.file:
        entry["origin"] = {"layer": node.origin.path, "file": node.origin.file, "line": node.origin.line}
    if node.regions:
        entry["regions"] = [graph_data(r) for r in node.regions]
    return entry


def to_dot(graph: Graph, allocated: Mapping[Node, int] | None = None, summary: str = "") -> str:
    """Return a graph in DOT for Graphviz: boxes for operations, ellipses for inputs and outputs, types on edges.

    ``allocated`` are the bytes of each operation's results, and ``summary`` is the caption of the drawing.
    """
    lines = [f"digraph {label(graph.name)} {{", "  rankdir=TB;", '  node [shape=box, fontname="Helvetica"];']
    if summary:
        lines.append(f"  label={label(summary)};")
    sources: dict[Value, str] = {}
    for k, i in enumerate(graph.inputs):
        sources[i.value] = f"i{k}"
        style = ', style=filled, fillcolor="#eeeeee"' if i.role == "param" else ""
        lines.append(f"  i{k} [shape=ellipse, label={label(i.name, i.role)}{style}];")
    for k, node in enumerate(graph.nodes):
        sources.update((v, f"n{k}") for v in node.results)
        extra = ", ".join(f"{name}={attribute_text(value)}" for name, value in node.attributes.items())
        memory = format_bytes(allocated[node]) if allocated and allocated.get(node) else ""
        text = label(*(part for part in (node.op.name, extra[:LABEL], node.origin.path, memory) if part))
        lines.append(f"  n{k} [label={text}];")
        for v in node.operands:
            if v is not None:
                lines.append(f"  {sources[v]} -> n{k} [label={label(str(v.type))}];")
    for k, (name, v) in enumerate(zip(graph.output_names, graph.outputs, strict=True)):
        lines.append(f"  o{k} [shape=ellipse, label={label(name)}];")
        lines.append(f"  {sources[v]} -> o{k} [label={label(str(v.type))}];")
    return "\n".join([*lines, "}"])


def label(*lines: str) -> str:
    """Return a DOT string literal; unescaped backslashes would be Graphviz's own escapes, such as the node name."""
    shown = (visible(line).replace("\\", "\\\\").replace('"', '\\"') for line in lines)
    return '"' + "\\n".join(shown) + '"'
