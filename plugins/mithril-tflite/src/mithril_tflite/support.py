"""The check that comes before an import: all unsupported operators at once."""

from __future__ import annotations

from collections.abc import Iterable

from mithril.graph import UnsupportedError
from mithril_importing.support import missing_lines
from mithril_tflite.reading import Graph, Node, TfliteFile
from mithril_tflite.table import OPERATORS

DATA = "the size of its result depends on data"
REASONS = {
    **dict.fromkeys(("NON_MAX_SUPPRESSION_V4", "NON_MAX_SUPPRESSION_V5", "UNIQUE"), DATA),
    **dict.fromkeys(("HASHTABLE", "HASHTABLE_FIND", "HASHTABLE_IMPORT", "HASHTABLE_LOOKUP"), "tables of strings"),
    **dict.fromkeys(("RANDOM_UNIFORM", "RANDOM_STANDARD_NORMAL", "MULTINOMIAL"), "random numbers"),
    "DELEGATE": "compiled for one processor",
}


def check_supported(file: TfliteFile, graph: Graph, nodes: Iterable[Node]) -> None:
    """Raise UnsupportedError that lists every operator without a meaning here, with its first result."""
    missing: dict[str, list[str]] = {}
    for node in nodes:
        if node.name not in OPERATORS:
            name = graph.keys[node.outputs[0]] if node.outputs else ""
            missing.setdefault(node.name, []).append(f"operator {node.index} '{name}'")
    if not missing:
        return
    noun = "operator has" if len(missing) == 1 else "operators have"
    raise UnsupportedError(
        f"{len(missing)} {noun} no meaning here, in '{file.name}'",
        facts=missing_lines(missing, _reason),
        hint="ml.from_tflite(path, outputs=[...]) stops before them, at tensors of these names",
    )


def _reason(name: str) -> str | None:
    return "code that is not in the file" if name.startswith("custom") else REASONS.get(name)
