"""What training told: a row per epoch, the loss of every step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

Row = dict[str, float]


class History:
    """``history["loss"]`` is that column of the rows; ``history.steps`` the loss of each step."""

    def __init__(self, rows: list[Row] | None = None, steps: list[float] | None = None) -> None:
        self.rows: list[Row] = rows if rows is not None else []
        self.steps: list[float] = steps if steps is not None else []

    def __getitem__(self, column: str) -> list[float]:
        if not any(column in row for row in self.rows):
            raise KeyError(f"'{column}'; columns: {', '.join(self.columns)}")
        return [row.get(column, math.nan) for row in self.rows]

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(name for row in self.rows for name in row))

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        return "\n".join(line(row) for row in self.rows) or "nothing yet"


def line(row: Mapping[str, Any]) -> str:
    """A row as text."""
    return "  ".join(f"{name} {_number(value)}" for name, value in row.items())


def _number(value: Any) -> str:
    if isinstance(value, float) and not value.is_integer():
        return f"{value:.4g}"
    return str(int(value)) if isinstance(value, float) and math.isfinite(value) else str(value)


class Average:
    """Means of what many batches report, weighted by their sizes; the values stay on the device until asked for."""

    def __init__(self, read: Any) -> None:
        self.read = read  # device scalar -> float
        self.pending: list[tuple[Mapping[str, Any], int]] = []
        self.sums: dict[str, float] = {}
        self.weights: dict[str, float] = {}

    def add(self, reports: Mapping[str, Any], size: int) -> None:
        self.pending.append((reports, size))

    def settle(self) -> list[dict[str, float]]:
        """Read what is pending; gives it as numbers."""
        rows = []
        for reports, size in self.pending:
            row = {n: self.read(x) for n, x in reports.items()}
            for n, x in row.items():
                self.sums[n] = self.sums.get(n, 0.0) + x * size
                self.weights[n] = self.weights.get(n, 0.0) + size
            rows.append(row)
        self.pending = []
        return rows

    def __iter__(self) -> Iterator[str]:
        return iter(self.sums)

    def means(self) -> Row:
        self.settle()
        return {n: total / self.weights[n] for n, total in self.sums.items()}
