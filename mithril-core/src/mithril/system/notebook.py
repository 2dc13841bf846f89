"""HTML for notebooks: tables with bars, folded sections, and curves, without scripts and without style sheets."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence

CELL = "padding:2px 8px;border-bottom:1px solid #8883;text-align:"
LEFT = "left;overflow-wrap:anywhere;min-width:12em"  # names break in a narrow cell, numbers do not
COLORS = ("#4c78a8", "#e45756", "#54a24b", "#b279a2", "#f58518", "#72b7b2")
WIDTH, HEIGHT = 420, 150
SCROLLS = '<div style="overflow-x:auto;max-width:100%">'  # within a narrow cell
ROWS = 16  # of a table before its folded section


def heading(text: str) -> str:
    """Return a title line."""
    return f'<div style="font-weight:600;margin:4px 0">{html.escape(text)}</div>'


def table(head: Sequence[str], rows: Iterable[Sequence[object]], shares: Sequence[float] = ()) -> str:
    """Return a table of the first rows, and the others in a folded section; columns of numbers are aligned right.

    ``shares`` (0 to 1, one per row) adds a column of bars.
    """
    listed = [[str(x) for x in row] for row in rows]
    sides = [
        "right;white-space:nowrap" if all(_is_number(row[k]) for row in listed) else LEFT for k in range(len(head))
    ]
    first = _table(head, listed[:ROWS], shares[:ROWS], sides)
    if len(listed) <= ROWS:
        return first
    return first + folded(f"{len(listed) - ROWS} more rows", _table(head, listed[ROWS:], shares[ROWS:], sides))


def _is_number(cell: str) -> bool:
    return cell in ("", "-") or cell.lstrip("-")[:1].isdigit()


def _table(head: Sequence[str], rows: list[list[str]], shares: Sequence[float], sides: list[str]) -> str:
    titles = "".join(
        f'<th style="{CELL}{side}">{html.escape(name)}</th>' for name, side in zip(head, sides, strict=True)
    )
    lines = []
    for number, row in enumerate(rows):
        cells = "".join(f'<td style="{CELL}{side}">{html.escape(x)}</td>' for x, side in zip(row, sides, strict=True))
        if shares:
            cells += f'<td style="{CELL}left;width:130px">{_bar(shares[number])}</td>'
        lines.append(f"<tr>{cells}</tr>")
    space = '<th style="border-bottom:1px solid #8883"></th>' if shares else ""
    style = "border-collapse:collapse;font-size:12px;font-family:ui-monospace,monospace"
    return f'{SCROLLS}<table style="{style}"><tr>{titles}{space}</tr>{"".join(lines)}</table></div>'


def _bar(share: float) -> str:
    width = round(120 * min(max(share, 0.0), 1.0)) if math.isfinite(share) else 0
    return f'<div style="background:{COLORS[0]};height:9px;width:{width}px"></div>'


def folded(title: str, content: str, opened: bool = False) -> str:
    """Return a section that opens and closes by a click on its title; ``content`` is HTML."""
    inner = f'<div style="margin-left:14px">{content}</div>'
    return f"<details{' open' if opened else ''}><summary>{html.escape(title)}</summary>{inner}</details>"


def paragraphs(lines: Iterable[str]) -> str:
    """Return lines of prose, broken where the cell is narrow."""
    style = "font-size:12px;line-height:1.5;overflow-wrap:anywhere"
    return f'<div style="{style}">{"<br>".join(map(html.escape, lines))}</div>'


def text(content: str) -> str:
    """Return preformatted text, folded if it is long."""
    if content.count("\n") > 2 * ROWS:
        first, _, rest = content.partition("\n")
        return folded(f"{first.strip()} ({rest.count(chr(10)) + 1} lines)", _text(content))
    return _text(content)


def _text(content: str) -> str:
    style = "font-size:12px;line-height:1.35;margin:4px 0;overflow-x:auto;max-width:100%"
    return f'<pre style="{style}">{html.escape(content)}</pre>'


def curves(series: Mapping[str, Sequence[float]]) -> str:
    """Return a picture of curves over the same steps, each between its own smallest and largest value."""
    lines, legend = [], []
    for k, (name, values) in enumerate(series.items()):
        finite = [v for v in values if math.isfinite(v)]
        if len(finite) < 2:
            continue
        color, low = COLORS[k % len(COLORS)], min(finite)
        span = (max(finite) - low) or 1.0
        points = " ".join(
            f"{8 + (WIDTH - 16) * x / (len(values) - 1):.1f},{HEIGHT - 8 - (HEIGHT - 16) * (v - low) / span:.1f}"
            for x, v in enumerate(values)
            if math.isfinite(v)
        )
        lines.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.6"/>')
        legend.append(f'<span style="color:{color}">{html.escape(name)} {low:.4g} to {max(finite):.4g}</span>')
    if not lines:
        return ""
    frame = f'<rect width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#8886"/>'
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" style="width:{WIDTH}px;max-width:100%"'
    picture = f'<svg {size} role="img">{frame}{"".join(lines)}</svg>'
    return f'<div>{picture}</div><div style="font-size:12px">{" &nbsp; ".join(legend)}</div>'


__all__ = ["curves", "folded", "heading", "paragraphs", "table", "text"]
