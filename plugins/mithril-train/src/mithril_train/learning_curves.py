"""Learning curves as SVG, drawn without a plotting library."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from mithril.graph import visible
from mithril.system import files

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 400, 64, 16, 40, 48
COLORS = ("#3366cc", "#dc3912", "#109618", "#ff9900", "#990099", "#0099c6", "#444444")
DASHES = ("", "6 3", "2 2", "8 3 2 3")  # keeps coinciding curves visible
Curve = Sequence[float]


def curves(
    path: str | os.PathLike[str],
    values: Mapping[str, Curve | tuple[Curve, Curve]],
    *,
    title: str = "",
    x: str = "step",
    y: str = "loss",
    log: bool = False,
) -> Path:
    """Draw each named curve: its values, or a pair of positions and values. ``log`` selects a logarithmic scale."""
    points = {name: _points(curve, log) for name, curve in values.items()}
    every = [p for line in points.values() for p in line]
    if not every:
        raise ValueError("there is nothing to draw")
    across = _Axis([p[0] for p in every], LEFT, WIDTH - RIGHT)
    up = _Axis([p[1] for p in every], HEIGHT - BOTTOM, TOP)
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
            'font-size="12">'
        ),
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{WIDTH / 2}" y="22" text-anchor="middle" font-size="15">{escape(visible(title))}</text>',
        *_grid(across, up, log),
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 10}" text-anchor="middle">{escape(visible(x))}</text>',
        f'<text x="{LEFT}" y="{TOP - 8}">{escape(visible(y))}</text>',
    ]
    for k, (name, line) in enumerate(points.items()):
        color, dash = COLORS[k % len(COLORS)], DASHES[k % len(DASHES)]
        places = " ".join(f"{across.place(a):.1f},{up.place(b):.1f}" for a, b in line)
        style = f'fill="none" stroke="{color}" stroke-width="1.8"' + (f' stroke-dasharray="{dash}"' if dash else "")
        parts.append(f'<polyline points="{places}" {style}><title>{escape(visible(name))}</title></polyline>')
        height = TOP + 14 + 18 * k
        parts.append(f'<line x1="{WIDTH - 170}" y1="{height - 4}" x2="{WIDTH - 146}" y2="{height - 4}" {style}/>')
        parts.append(f'<text x="{WIDTH - 140}" y="{height}">{escape(visible(name))}</text>')
    parts.append("</svg>\n")
    return files.write(path, "\n".join(parts), "picture")


def _points(curve: Any, log: bool) -> list[tuple[float, float]]:
    """Return the points of a curve without those that are not finite or have no logarithm."""
    pair = isinstance(curve, tuple) and len(curve) == 2 and not isinstance(curve[0], (int, float))
    places, heights = curve if pair else (range(1, len(curve) + 1), curve)
    points = []
    for a, b in zip(places, heights, strict=True):
        if math.isfinite(b) and (not log or b > 0):
            points.append((float(a), math.log10(b) if log else float(b)))
    return points


class _Axis:
    """A mapping from values to coordinates of the picture."""

    def __init__(self, values: Sequence[float], first: float, last: float) -> None:
        self.low, self.high = min(values), max(values)
        if self.low == self.high:
            self.low, self.high = self.low - 0.5, self.high + 0.5
        self.first, self.last = first, last

    def place(self, value: float) -> float:
        return self.first + (value - self.low) / (self.high - self.low) * (self.last - self.first)

    def ticks(self) -> list[float]:
        """Return about five round numbers."""
        rough = (self.high - self.low) / 5
        size = 10.0 ** math.floor(math.log10(rough))
        step = next(size * m for m in (1, 2, 5, 10) if size * m >= rough)
        first = math.ceil(self.low / step)
        return [k * step for k in range(first, math.floor(self.high / step + 1e-9) + 1)]

    def decades(self) -> list[float]:
        """Return logarithms of powers of ten and, if these are few, of 2 and 5 times those."""
        powers = range(math.floor(self.low), math.ceil(self.high) + 1)
        digits = (1, 2, 5) if self.high - self.low < 3 else (1,)
        exponents = [k + math.log10(d) for k in powers for d in digits]
        return [v for v in exponents if self.low <= v <= self.high]


def _grid(across: _Axis, up: _Axis, log: bool) -> list[str]:
    parts = []
    for value in across.ticks():
        place = across.place(value)
        parts.append(f'<line x1="{place:.1f}" y1="{TOP}" x2="{place:.1f}" y2="{HEIGHT - BOTTOM}" stroke="#eeeeee"/>')
        parts.append(f'<text x="{place:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{value:g}</text>')
    for value in up.decades() if log else up.ticks():
        place = up.place(value)
        parts.append(f'<line x1="{LEFT}" y1="{place:.1f}" x2="{WIDTH - RIGHT}" y2="{place:.1f}" stroke="#eeeeee"/>')
        text = f"{10**value:.1g}" if log else f"{value:.4g}"
        parts.append(f'<text x="{LEFT - 6}" y="{place + 4:.1f}" text-anchor="end">{text}</text>')
    frame = f'width="{WIDTH - RIGHT - LEFT}" height="{HEIGHT - BOTTOM - TOP}" fill="none" stroke="#888888"'
    parts.append(f'<rect x="{LEFT}" y="{TOP}" {frame}/>')
    return parts
