"""Printer of graphs as readable text, the inverse of ``parse``."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from mithril.graph.attribute_types import attribute_text, attributes_text
from mithril.graph.core import Graph, Input, Node, Output, Value
from mithril.graph.dims import symbols
from mithril.graph.errors import quoted, visible
from mithril.graph.result_names import result_name

PLAIN = re.compile(r"[\w./'-]+")  # names printed without quotes
SMALL = 16  # maximal number of elements of a constant printed as numbers


def to_text(graph: Graph, *, origins: bool = True) -> str:
    """Return the text of a graph."""
    return "\n".join(_Printer(origins).graph(graph, ""))


def structural_hash(graph: Graph) -> str:
    """Return a hash that ignores names of inner values and origins only."""
    canonical = _Printer(origins=False, canonical=True)
    return hashlib.sha256("\n".join(canonical.graph(graph, "")).encode()).hexdigest()


def structurally_equal(a: Graph, b: Graph) -> bool:
    """Whether two graphs are structurally equal."""
    return a is b or structural_hash(a) == structural_hash(b)


def window(graph: Graph, node: Node, around: int = 2) -> list[str]:
    """Return the lines of graph text around a node, with the node's line marked."""
    position = next((k for k, n in enumerate(graph.nodes) if n is node), None)
    if position is None:
        return [repr(node)]
    low, high = max(0, position - around), min(len(graph.nodes), position + around + 1)
    printer = _Printer(origins=True)
    printer.name_inputs(graph)
    lines = []
    for k in range(low, high):
        text = printer.node(graph.nodes[k], "")[0]
        lines.append(("> " if k == position else "  ") + text)
    return lines


class _Printer:
    def __init__(self, origins: bool, canonical: bool = False) -> None:
        self.origins = origins
        self.canonical = canonical
        self.names: dict[Value, str] = {}
        self.used_names: set[str] = set()

    # -- names -------------------------------------------------------------------------------------------------------
    def name(self, value: Value | None) -> str:
        if value is None:
            return "none"
        name = self.names.get(value)
        if name is None:
            name = self.names[value] = self._fresh(str(len(self.names)) if self.canonical else value.name)
        return "%" + name_text(name)

    def _fresh(self, stem: str) -> str:
        name, n = stem, 1
        while name in self.used_names:
            name, n = f"{stem}'{n}", n + 1
        self.used_names.add(name)
        return name

    def name_inputs(self, graph: Graph) -> None:
        for i in graph.inputs:
            if i.role == "constant" and self.canonical:
                self.name(i.value)
            else:
                self.names[i.value] = self._fresh(i.name)

    # -- lines -------------------------------------------------------------------------------------------------------
    def graph(self, graph: Graph, indent: str) -> list[str]:
        inner = indent + "  "
        lines = [f"{indent}graph {name_text(graph.name)} {{"]
        self.name_inputs(graph)
        sizes = [d for i in graph.inputs for d in i.type.shape]
        for symbol in symbols(*sizes):
            high = "any" if symbol.high is None else symbol.high
            lines.append(f"{inner}dim {symbol.name} in {symbol.low}..{high}")
        lines += [inner + self._input(i) for i in graph.inputs]
        for guard in graph.guards:
            lines.append(
                f"{inner}guard {guard.left} {guard.relation} {guard.right}  # {visible(guard.reason)}".rstrip(" #")
            )
        for node in graph.nodes:
            lines += self.node(node, inner)
        lines.append(inner + "return " + ", ".join(f"{result_text(r)}={self.name(r.value)}" for r in graph.results))
        lines.append(indent + "}")
        return lines

    def _input(self, i: Input) -> str:
        owner = f"({name_text(i.of)})" if i.of else ""
        text = f"{i.role}{owner} {self.name(i.value)}: {i.type}"
        if i.data is not None:
            text += " = " + array_text(i.data)
        return text + tags_text(i.tags)

    def node(self, node: Node, indent: str) -> list[str]:
        operands = [self.name(v) for v in node.operands]
        attributes = attributes_text(node.attributes, node.op.defaults)
        arguments = ", ".join([*operands, attributes] if attributes else operands)
        results = ", ".join(f"{self.name(v)}: {v.type}" for v in node.results)
        text = f"{indent}{results} = {node.op.name}({arguments}){tags_text(node.tags)}"
        origin = ""
        o = node.origin
        if self.origins and (o.path or o.file):
            plain = o.path == o.path.strip() and '"' not in o.path and " @ " not in o.path
            path = o.path if plain and o.path.isprintable() else quoted(o.path)
            origin = f"  # {path}" + (f" @ {visible(o.file)}:{o.line}" if o.file else "")
        if not node.regions:
            return [text + origin]
        lines = [text + " {" + origin]
        for region in node.regions:
            inner = _Printer(self.origins, self.canonical)
            lines += inner.graph(region, indent + "  ")
        return [*lines, indent + "}"]


def name_text(name: str) -> str:
    """Return the name, in quotes if it contains unusual characters."""
    return name if PLAIN.fullmatch(name) else quoted(name)


def result_text(r: Output) -> str:
    """Return the text of a result, such as ``y`` or ``gradient(w)``, and its name if that is not the default."""
    if r.role == "output" and not r.of:
        return name_text(r.name)
    name = "" if r.name == result_name(r.role, r.of) else " " + name_text(r.name)
    return f"{r.role}({name_text(r.of)}){name}"


def tags_text(tags: Mapping[str, Any]) -> str:
    return f" {{{attributes_text(tags)}}}" if tags else ""


def array_text(data: np.ndarray[Any, Any]) -> str:
    """Return small arrays as numbers, others as base64 of their little-endian bytes."""
    if data.size <= SMALL and data.dtype.kind in "iubf":
        return attribute_text(tuple(data.ravel().tolist()))
    raw = np.asarray(data, order="C")
    raw = raw.astype(raw.dtype.newbyteorder("<")) if raw.dtype.kind in "iuf" else raw
    return "base64:" + base64.b64encode(raw.tobytes()).decode()


Graph._printer = staticmethod(to_text)
