"""The drawing as an HTML page in which layers can be expanded."""

from __future__ import annotations

from dataclasses import replace
from html import escape

from mithril import Graph
from mithril.base import visible
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
