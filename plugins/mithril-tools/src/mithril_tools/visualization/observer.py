"""``visualize=True``: write a drawing of the first program's graph to a file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from html import escape
from typing import Any

from mithril import CompileContext, Graph, OptionError
from mithril.compiler import Program, ProgramMemory
from mithril.graph import unknown, visible
from mithril.system import files
from mithril_tools.show.graph_formats import to_dot
from mithril_tools.visualization.picture import DrawingStyle, page_depth, svg, title

HEAD = "<!doctype html><meta charset='utf-8'><meta name='viewport' content='width=device-width'>"
STYLE = (
    "body{font-family:sans-serif;margin:1em}"
    "details{margin:.3em 0 .3em 1em;border-left:2px solid #ddd;padding-left:.8em}"
    "summary{cursor:pointer;font-family:monospace}svg{max-width:100%;height:auto}"
    "@media(prefers-color-scheme:dark){body{background:#16181c;color:#ddd}details{border-color:#444}}"
)


def html(graph: Graph, look: DrawingStyle | None = None) -> str:
    """Return the page, without scripts or other files: ``<details>`` collapses layers."""
    look = look or DrawingStyle()
    tree: dict[str, list[str]] = {}
    for path in dict.fromkeys(n.origin.path for n in graph.nodes if not n.is_constant and n.origin.path):
        parts = path.split(".")
        for k in range(len(parts)):
            parent, child = ".".join(parts[:k]), ".".join(parts[: k + 1])
            children = tree.setdefault(parent, [])
            if child != parent and child not in children:  # a name may begin with a dot
                children.append(child)
    pieces = [
        f"{HEAD}<title>{escape(visible(title(graph)))}</title><style>{STYLE}</style>",
        f"<h1>{escape(visible(title(graph)))}</h1>",
        svg(graph, replace(look, depth=look.depth or page_depth([n for n in graph.nodes if not n.is_constant]))),
    ]
    pending: list[tuple[str, bool]] = [(child, False) for child in reversed(tree.get("", []))]
    while pending:
        path, closing = pending.pop()
        if closing:
            pieces.append("</details>")
            continue
        pieces.append(f"<details><summary>{escape(visible(path))}</summary>")
        deeper = tree.get(path, [])
        pieces.append(svg(graph, replace(look, depth=1 if deeper else None), under=path))
        pending.append((path, True))
        pending += [(child, False) for child in reversed(deeper)]
    return "\n".join(pieces) + "\n"


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
        drawings = {
            "svg": lambda: svg(graph, look),
            "html": lambda: html(graph, look),
            "dot": lambda: to_dot(graph, look.allocated(), look.caption()),
        }
        files.write(path, drawings[self.format]() + "\n", "viz_options: output_path")
        self.context.decisions.record("choice", f"the graph is drawn in {json.dumps(str(path))}")
