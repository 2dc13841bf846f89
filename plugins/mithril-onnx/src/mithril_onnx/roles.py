"""The roles of initializers: trainable parameters, statistics of batch norms, or constants."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from mithril.base import dtype as as_dtype
from mithril_onnx.reading import OnnxFile
from mithril_onnx.table import OPERATORS, Row, canonical_domain


def roles_of(file: OnnxFile, graph: Any, rows: Mapping[tuple[str, str], Row], fixed: Collection[str]) -> dict[str, str]:
    """Return the role of each initializer of the graph.

    Floats of more than one element are parameters, unless an operator needs their elements at import. Integers,
    scalars and tensors of 8 and fewer bits are constants.
    """
    uses: dict[str, set[str]] = {}
    for name, kind in _uses(file, graph, rows):
        uses.setdefault(name, set()).add(kind)
    roles = {}
    for t in graph.initializer:
        if t.name in fixed:
            continue
        array = file.arrays[t.name]
        kinds = uses.get(t.name, set())
        trains = array.size > 1 and as_dtype(array.dtype).is_float and t.data_type in FLOATS
        if not trains or kinds & {"Known", "Sizes"}:
            roles[t.name] = "constant"
        elif kinds == {"State"}:
            roles[t.name] = "state"
        elif kinds:
            roles[t.name] = "param"
    return roles


FLOATS = (1, 10, 11, 16)  # FLOAT, FLOAT16, DOUBLE, BFLOAT16


def _uses(file: OnnxFile, graph: Any, rows: Mapping[tuple[str, str], Row]) -> Iterator[tuple[str, str]]:
    """Yield the name of each tensor that a node reads, with the annotation of the operand."""
    for node in graph.node:
        domain = canonical_domain(node.domain)
        version = file.opset if not domain else 1 << 30
        row = rows.get((domain, node.op_type)) or OPERATORS.find(domain, node.op_type, version)
        for k, name in enumerate(node.input):
            if name:
                yield name, row.kind(k) if row is not None else "Operand"
        for a in node.attribute:
            if a.HasField("g"):
                yield from _uses(file, a.g, rows)
    for output in graph.output:
        yield output.name, "Operand"
