"""Pictures of the documentation as SVG, readable on light and dark pages: ``python docs/plots.py`` writes them.

The plots show the tables of docs/benchmarks.md; the overview is drawn for the README.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

DOCS = Path(__file__).parent
PICTURES = DOCS / "pictures"
INK = "#6b7480"  # readable on white and on dark gray; lighter where the system is dark
COLORS = ("#5c6bc0", "#ff7043", "#26a69a", "#ab8b4f")
FONT = f"font:13px system-ui,-apple-system,'Segoe UI',sans-serif;fill:{INK}"
STYLE = f"<style>text{{{FONT}}}.small{{font-size:12px}}"
STYLE += "@media(prefers-color-scheme:dark){text{fill:#a3adb8}}</style>"
BAR, GAP, LEFT, RIGHT, WIDTH = 13, 16, 268, 40, 760
Table = tuple[list[str], list[tuple[str, list[list[float]]]]]


def table(text: str, number: int) -> Table:
    """Return the columns of a table of the page, and its rows: a title, and the numbers of each cell."""
    block = re.findall(r"(?:^\|.*\n)+", text, re.M)[number]
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()]
    return head[1:], [(row[0], [[float(n) for n in cell.split(",")] for cell in row[1:]]) for row in rows]


def bars(
    groups: Sequence[tuple[str, Sequence[tuple[float, int]]]], legend: Sequence[str], limit: float, note: str
) -> str:
    """Return a plot of horizontal bars: groups of values with the number of their color, and a line at 1."""
    scale = (WIDTH - LEFT - RIGHT) / limit
    top, parts = 40, []
    for title, values in groups:
        height = BAR * len(values)
        parts.append(f'<text x="{LEFT - 10}" y="{top + height / 2 + 4:.0f}" text-anchor="end">{escape(title)}</text>')
        for k, (value, color) in enumerate(values):
            y, length = top + k * BAR, value * scale
            parts.append(
                f'<rect x="{LEFT}" y="{y}" width="{length:.1f}" height="{BAR - 2}" rx="2" fill="{COLORS[color]}"/>'
                f'<text class="small" x="{LEFT + length + 5:.1f}" y="{y + 10}">{value:.2f}</text>'
            )
        top += height + GAP
    x = LEFT + scale
    line = f'<line x1="{x:.1f}" y1="30" x2="{x:.1f}" y2="{top - 6}" stroke="{INK}" stroke-dasharray="4 3"/>'
    names, place = [], LEFT
    for k, name in enumerate(legend):
        names.append(
            f'<rect x="{place}" y="8" width="11" height="11" rx="2" fill="{COLORS[k]}"/>'
            f'<text x="{place + 17}" y="18">{escape(name)}</text>'
        )
        place += 38 + round(7.6 * len(name))
    end = f'<text class="small" x="{LEFT}" y="{top + 8}">{escape(note)}</text>'
    return _svg(WIDTH, top + 18, "".join([*names, line, *parts, end]))


def _svg(width: int, height: int, body: str) -> str:
    box = f'xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return f"<svg {box}>{STYLE}{body}</svg>\n"


def frameworks(text: str) -> str:
    """Plot the time over that of a model written by hand, by model and framework, with gradients where measured."""
    models, rows = table(text, 0)
    groups = [
        (model, [(cells[k][-1], color) for color, (_, cells) in enumerate(rows)]) for k, model in enumerate(models)
    ]
    note = "time over that of the same model written by hand, with gradients; less is faster"
    return bars(groups, [name for name, _ in rows], 1.15, note)


def inference(text: str) -> str:
    """Plot the time of other engines over that of the C backend."""
    engines, rows = table(text, 1)
    groups = [(title, [(cell[0], k) for k, cell in enumerate(cells)]) for title, cells in rows]
    return bars(groups, engines, 3.9, "time over that of mithril's C backend; more than 1: the C backend is faster")


def overview() -> str:
    """Draw the way of a model: layers, one graph, passes, the program of each backend."""
    backends = (
        ("NumPy", "Python source"),
        ("JAX", "Python source, jit, TPU"),
        ("PyTorch", "Python source, autograd"),
        ("MLX", "Python source"),
        ("C", "kernels by TVM, C files"),
        ("GGML", "quantized, GGUF"),
    )
    step, top = 44, 10
    parts = [
        _box(6, 100, 158, 74, "model", "layers, or functions", "#e8eaf6", "#3949ab"),
        _box(228, 70, 192, 134, "graph", "of declared operations", "#fff3e0", "#e65100"),
        '<text x="324" y="226" text-anchor="middle" class="small">one definition of each operation</text>',
        _arrow(164, 137, 226, 137),
        '<text x="195" y="128" text-anchor="middle" class="small">trace</text>',
    ]
    for k, name in enumerate(("gradients", "vmap, jvp", "passes")):
        parts.append(
            f'<rect x="{238 + 59 * k}" y="156" width="55" height="34" rx="5" fill="#ffe0b2"/>'
            f'<text x="{265.5 + 59 * k}" y="177" text-anchor="middle" style="font-size:10px;fill:#5d4037">{name}</text>'
        )
    for k, (name, form) in enumerate(backends):
        y = top + k * step
        parts.append(_arrow(420, 137, 500, y + 18))
        parts.append(
            f'<rect x="502" y="{y}" width="250" height="36" rx="6" fill="#e0f2f1" stroke="#00897b"/>'
            f'<text x="516" y="{y + 23}" style="fill:#004d40;font-weight:600">{name}</text>'
            f'<text x="740" y="{y + 23}" text-anchor="end" class="small" style="fill:#00695c">{form}</text>'
        )
    marker = (
        '<defs><marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0L8 4L0 8z" fill="{INK}"/></marker></defs>'
    )
    return _svg(WIDTH, top + step * len(backends) + 2, marker + "".join(parts))


def _box(x: int, y: int, width: int, height: int, title: str, text: str, fill: str, stroke: str) -> str:
    middle = x + width / 2
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="8" fill="{fill}" stroke="{stroke}"/>'
        f'<text x="{middle}" y="{y + 32}" text-anchor="middle" style="font-weight:600;font-size:15px;fill:{stroke}">'
        f"{title}</text>"
        f'<text x="{middle}" y="{y + 54}" text-anchor="middle" class="small" style="fill:#37474f">{text}</text>'
    )


def _arrow(x1: int, y1: int, x2: int, y2: int) -> str:
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{INK}" stroke-width="1.4" marker-end="url(#a)"/>'


def pictures() -> dict[str, str]:
    """Return the pictures by file name."""
    text = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    return {"overview.svg": overview(), "frameworks.svg": frameworks(text), "inference.svg": inference(text)}


if __name__ == "__main__":
    for name, picture in pictures().items():
        (PICTURES / name).write_text(picture, encoding="utf-8")
