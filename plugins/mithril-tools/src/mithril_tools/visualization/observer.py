"""``visualize=True``: write a drawing of the first program's graph to a file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mithril import CompileContext, Graph, OptionError
from mithril.base import unknown
from mithril.runtime import Program, ProgramMemory
from mithril.system import files
from mithril_tools.show.graph_formats import to_dot
from mithril_tools.visualization.page import html
from mithril_tools.visualization.picture import DrawingStyle, svg

FORMATS = ("svg", "html", "dot")


class Drawing:
    """Draws the optimized graph, or with ``show_memory`` the graph that runs, whose memory is planned."""

    def __init__(self, context: CompileContext) -> None:
        self.context = context
        self.style: Mapping[str, Any] = context.options["viz_options"]
        self.format = str(self.style.get("format", "svg"))
        self.drawn = False

    def stage(self, name: str, graph: Graph | None, start: float, seconds: float) -> None:
        if name == "optimize" and graph is not None and not self.style.get("show_memory"):
            self._draw(graph)

    def passed(self, name: str, before: Graph, after: Graph, start: float, seconds: float) -> None: ...

    def built(self, program: Program) -> None:
        if self.style.get("show_memory"):
            self._draw(program.executable.graph, program.memory)

    def end(self, result: Any, error: BaseException | None) -> None: ...

    def _draw(self, graph: Graph, memory: ProgramMemory | None = None) -> None:
        if self.drawn:
            return
        self.drawn = True
        if self.format not in FORMATS:
            message, facts, hint = unknown("picture format", self.format, FORMATS)
            raise OptionError(message, facts=facts, hint=hint)
        path = self.style.get("output_path") or f"{graph.name}.{self.format}"
        look = DrawingStyle(
            show_shapes=bool(self.style.get("show_shapes", True)),
            show_types=bool(self.style.get("show_types", True)),
            depth=self.style.get("depth"),
            memory=memory,
        )
        drawings = {"svg": lambda: svg(graph, look), "html": lambda: html(graph, look), "dot": lambda: to_dot(graph)}
        files.write(path, drawings[self.format]() + "\n", "viz_options: output_path")
        self.context.decisions.record("choice", f"the graph is drawn in {json.dumps(str(path))}")
