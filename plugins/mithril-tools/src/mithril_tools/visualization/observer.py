"""``visualize=True``: write a drawing of the optimized graph to a file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mithril import CompileContext, Graph, OptionError
from mithril.base import unknown
from mithril.system import files
from mithril_tools.show.graph_formats import to_dot
from mithril_tools.visualization.page import html
from mithril_tools.visualization.picture import DrawingStyle, svg

FORMATS = ("svg", "html", "dot")


def draw(context: CompileContext, graph: Graph) -> str:
    """Write the drawing and print its path."""
    style: Mapping[str, Any] = context.options["viz_options"]
    form = str(style.get("format", "svg"))
    if form not in FORMATS:
        message, facts, hint = unknown("picture format", form, FORMATS)
        raise OptionError(message, facts=facts, hint=hint)
    path = style.get("output_path") or f"{graph.name}.{form}"
    look = DrawingStyle(
        show_shapes=bool(style.get("show_shapes", True)),
        show_types=bool(style.get("show_types", True)),
        show_memory=bool(style.get("show_memory", False)),
        depth=style.get("depth"),
    )
    text = {"svg": lambda: svg(graph, look), "html": lambda: html(graph, look), "dot": lambda: to_dot(graph)}[form]()
    files.write(path, text + "\n", "viz_options: output_path")
    context.decisions.record("choice", f"the graph is drawn in {json.dumps(str(path))}")
    return str(path)
