"""Training history: a row per epoch, the loss of every step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from mithril.system import notebook
from mithril_train.step.loss_binding import ScalarFunction
from mithril_train.step.step import Reports, statistic_name

Row = dict[str, float]


class History:
    """Training history: ``history["loss"]`` is a column of the rows; ``history.steps`` is the loss of each step."""

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

    def __iter__(self) -> Iterator[Row]:
        """Iterate over the rows of the epochs, which ``pandas.DataFrame(history)`` reads too."""
        return iter(self.rows)

    def __repr__(self) -> str:
        return f"<History of {len(self)} epochs: {', '.join(self.columns)}>"

    def _repr_html_(self) -> str:
        columns = self.columns
        rows = [[_number(row.get(name, "")) for name in columns] for row in self.rows]
        shown = {name: self[name] for name in columns if name not in ("epoch", "seconds")}
        pictures = notebook.curves(shown) + notebook.curves({"loss of each step": self.steps})
        return notebook.heading(repr(self)[1:-1]) + pictures + notebook.folded("epochs", notebook.table(columns, rows))

    def __str__(self) -> str:
        return "\n".join(line(row) for row in self.rows) or "nothing yet"


def line(row: Mapping[str, Any]) -> str:
    """Format a row; the numbers of matrices, ``name/0/0`` and so on, would hide the others."""
    return "  ".join(f"{name} {_number(value)}" for name, value in row.items() if name.count("/") < 2)


def _number(value: Any) -> str:
    if isinstance(value, float) and not value.is_integer():
        return f"{value:.4g}"
    return str(int(value)) if isinstance(value, float) and math.isfinite(value) else str(value)


Tensors = dict[str, np.ndarray[Any, Any]]


class Totals:
    """Loss and metrics of many batches; the values stay on the device until they are read.

    Metrics with statistics are merged and computed once, from the statistics of all batches. Everything else is
    averaged, weighted by the sizes of the batches; losses by the sums of the sample weights, if there are any.
    """

    def __init__(self, measures: Mapping[str, ScalarFunction], read: Any) -> None:
        self.metrics = {name: m for name, m in measures.items() if m.metric is not None}
        self.measures = measures
        self.read = read  # device array -> NumPy array
        self.pending: list[tuple[Reports, int, float]] = []
        self.sums: dict[str, float] = {}
        self.weights: dict[str, float] = {}
        self.statistics: dict[str, Tensors] = {}

    def add(self, reports: Reports, size: int, weight: float | None = None) -> None:
        """Add the reports of a step; ``weight`` is the sum of the weights of its samples, if they have any."""
        self.pending.append((reports, size, size if weight is None else weight))

    def read_reports(self) -> list[dict[str, float]]:
        """Read all pending reports; return the averaged values of each batch."""
        # The reads may raise, for example because a device is lost: the sums change after all of them.
        values = [{n: float(self.read(x)) for n, x in reports.values.items()} for reports, _, _ in self.pending]
        merged = [statistics_of(self.metrics, reports.statistics, self.read) for reports, _, _ in self.pending]
        for row, by_metric, (_, size, weight) in zip(values, merged, self.pending, strict=True):
            for n, x in row.items():
                share = size if n in self.measures else weight
                self.sums[n] = self.sums.get(n, 0.0) + x * share
                self.weights[n] = self.weights.get(n, 0.0) + share
            for name, statistics in by_metric.items():
                old = self.statistics.get(name)
                merge = self.metrics[name].metric.merge  # type: ignore[union-attr]
                self.statistics[name] = statistics if old is None else dict(merge(old, statistics))
        self.pending = []
        return values

    def row(self) -> Row:
        """Return loss and metrics of all batches together."""
        self.read_reports()
        row = {n: total / self.weights[n] if self.weights[n] else 0.0 for n, total in self.sums.items()}
        for name, statistics in self.statistics.items():
            row |= self.metrics[name].results(name, statistics)
        return row

    def tensors(self) -> Tensors:
        """Return the statistics as tensors of a checkpoint."""
        return {statistic_name(m, n): x for m, by_name in self.statistics.items() for n, x in by_name.items()}

    def restore(self, sums: Mapping[str, Any], tensors: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Continue from the sums and statistics of a checkpoint."""
        self.sums, self.weights = dict(sums["sums"]), dict(sums["weights"])
        self.statistics = statistics_of(self.metrics, tensors, np.asarray)


def statistics_of(metrics: Mapping[str, ScalarFunction], values: Mapping[str, Any], read: Any) -> dict[str, Tensors]:
    """Return the statistics of each metric among the values of a step, in double precision."""
    statistics: dict[str, Tensors] = {}
    for metric in metrics:
        head = statistic_name(metric, "")
        names = [n for n in values if n.startswith(head) and "/" not in n[len(head) :]]
        if names:
            statistics[metric] = {n[len(head) :]: np.asarray(read(values[n]), np.float64) for n in names}
    return statistics
