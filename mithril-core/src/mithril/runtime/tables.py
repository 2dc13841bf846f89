"""Plain text tables, and numbers with SI prefixes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mithril.base import visible


def format_si(number: float) -> str:
    """Format a number with an SI prefix: 1234567 as 1.23M."""
    for unit in ("", "k", "M", "G", "T"):
        if abs(number) < 1000 or unit == "T":
            return f"{number:.3g}{unit}" if unit else f"{int(number)}"
        number /= 1000
    return ""


def columns(head: Sequence[str], rows: Iterable[Sequence[str]], width: int = 100) -> list[str]:
    """Format a table as aligned columns; the first one is truncated if the terminal is narrow."""
    table = [list(head), *[list(map(visible, r)) for r in rows]]
    widths = [max(len(r[k]) for r in table) for k in range(len(head))]
    spare = width - sum(widths[1:]) - 2 * (len(head) - 1)
    widths[0] = min(widths[0], max(spare, 16))
    lines = []
    for row in table:
        first = row[0] if len(row[0]) <= widths[0] else "…" + row[0][-(widths[0] - 1) :]
        cells = [
            first.ljust(widths[0]),
            *(c.ljust(w) if k == 0 else c.rjust(w) for k, (c, w) in enumerate(zip(row[1:], widths[1:], strict=True))),
        ]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "-" * min(width, sum(widths) + 2 * (len(head) - 1)))
    return lines
