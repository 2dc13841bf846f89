"""``save_intermediates=True``: the graph of every stage and pass, stored on the compiled model and in a directory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mithril.ir import Graph, to_text
from mithril.system import files

if TYPE_CHECKING:
    from mithril.plugins import CompileContext


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
