"""``dump_graph="folder"``: the graph after each stage and pass, in numbered files."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mithril.graph import Graph, to_text
from mithril.system import files
from mithril_tools.show.graph_formats import to_dot, to_json

if TYPE_CHECKING:
    from mithril.plugins import CompileContext


FORMATS: dict[str, tuple[str, Callable[[Graph], str]]] = {
    "text": ("txt", to_text),
    "json": ("json", to_json),
    "dot": ("dot", to_dot),
}


class Dump:
    """Observer that writes ``000-shapes.txt``, ``001-dead-code.txt`` ...; numbers continue in later programs."""

    def __init__(self, context: CompileContext) -> None:
        self.folder = Path(context.options["dump_graph"])
        self.suffix, self.form = FORMATS[context.options["dump_format"]]
        self.count = 0

    def stage(self, name: str, graph: Graph | None, start: float, seconds: float) -> None:
        # The same graph as after shapes, after the passes.
        if graph is not None and name not in ("types", "optimize"):
            self._write(name, graph)

    def passed(self, name: str, before: Graph, after: Graph, start: float, seconds: float) -> None:
        self._write(name, after)

    def end(self, result: Any, error: BaseException | None) -> None:
        return None

    def _write(self, name: str, graph: Graph) -> None:
        file = f"{self.count:03}-{re.sub(r'[^A-Za-z0-9_.-]', '_', name)}.{self.suffix}"
        files.write(self.folder / file, self.form(graph) + "\n", "dump_graph")
        self.count += 1


class Intermediates:
    """Observer that stores ``compiled.stages["simplify"]``, the graph after that pass; keys of later programs end in
    ``#2``.
    """

    def __init__(self, context: CompileContext) -> None:
        folder = context.options["intermediate_dir"]
        self.folder = Path(folder) if folder is not None else None
        self.graphs: dict[str, Graph] = {}
        self.program = 0

    def stage(self, name: str, graph: Graph | None, start: float, seconds: float) -> None:
        self.program += name == "shapes"
        if graph is not None:
            self._keep(name, graph)

    def passed(self, name: str, before: Graph, after: Graph, start: float, seconds: float) -> None:
        self._keep(name, after)

    def end(self, result: Any, error: BaseException | None) -> None:
        if result is not None:
            result.stages = self.graphs  # the same dictionary, so that later programs appear in it

    def _keep(self, name: str, graph: Graph) -> None:
        key = name if self.program <= 1 else f"{name}#{self.program}"
        self.graphs[key] = graph
        if self.folder is not None:
            files.write(self.folder / f"{key.replace('#', '.')}.txt", to_text(graph) + "\n", "intermediate_dir")
