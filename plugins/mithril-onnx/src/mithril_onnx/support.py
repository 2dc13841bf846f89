"""The check that comes before an import: all unsupported operators at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mithril.graph import UnsupportedError
from mithril_importing.support import missing_lines
from mithril_onnx.functions import schema_of
from mithril_onnx.reading import OnnxFile
from mithril_onnx.table import OPERATORS, Row, canonical_domain

REASONS = {
    "NonZero": "the size of its result depends on data",
    "NonMaxSuppression": "the size of its result depends on data",
    "Compress": "the size of its result depends on data",
    "Unique": "the size of its result depends on data",
    **dict.fromkeys(("StringConcat", "StringNormalizer", "StringSplit", "RegexFullMatch"), "strings"),
    "ImageDecoder": "files",
}


def check_supported(file: OnnxFile, graph: Any, rows: Mapping[tuple[str, str], Row]) -> None:
    """Raise UnsupportedError that lists every operator without a meaning, with its nodes."""
    missing: dict[str, list[str]] = {}
    for domain, name, label in nodes_of(file, graph, set()):
        if (domain, name) in rows:
            continue
        version = file.opset if not domain else 1 << 30
        if OPERATORS.find(domain, name, version) is None and not _has_body(domain, name, file.opset):
            missing.setdefault(f"{domain}.{name}" if domain else name, []).append(label)
    if not missing:
        return
    noun = "operator has" if len(missing) == 1 else "operators have"
    example = next(iter(sorted(missing)))
    raise UnsupportedError(
        f"{len(missing)} {noun} no meaning here, in '{file.name}' (opset {file.opset})",
        facts=missing_lines(missing, lambda name: REASONS.get(name, "a vendor's operator" if "." in name else None)),
        hint=f"ml.from_onnx(path, outputs=[...]) stops before them; operators={{'{example}': function}} supplies one",
    )


def _has_body(domain: str, name: str, opset: int) -> bool:
    if domain:
        return False
    from types import SimpleNamespace

    schema = schema_of(SimpleNamespace(domain="", op_type=name), opset)
    return schema is not None and (schema.has_function or schema.has_context_dependent_function)


def nodes_of(file: OnnxFile, graph: Any, entered: set[Any], path: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield domain, operator and label of all nodes, with those of bodies and of local functions."""
    for k, node in enumerate(graph.node):
        domain = canonical_domain(node.domain)
        label = f"{path}{node.name or f'{node.op_type}_{k}'}"
        key = domain, node.op_type, getattr(node, "overload", "")
        if key in file.functions:
            if key not in entered:
                entered.add(key)
                yield from nodes_of(file, file.functions[key], entered, f"{label}/")
        else:
            yield domain, node.op_type, label
        for a in node.attribute:
            if a.HasField("g"):
                yield from nodes_of(file, a.g, entered, f"{label}/")
