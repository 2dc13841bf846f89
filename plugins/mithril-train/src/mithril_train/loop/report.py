"""The report of one step: loss and metrics, which stay on the device until they are read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy as np

from mithril_train.loop.history import statistics_of
from mithril_train.step.loss_binding import ScalarFunction
from mithril_train.step.step import Reports, rate_name


class Report(Mapping[str, float]):
    """Loss and metrics of a step, such as ``report["loss"]``; a value is fetched from the device on first access."""

    def __init__(
        self,
        reports: Reports,
        metrics: Mapping[str, ScalarFunction],
        *,
        step: int,
        rates: Mapping[str, float],
        read: Callable[[Any], np.ndarray[Any, Any]],
        check_finite: Callable[[], None],
    ) -> None:
        self.reports = reports
        self.step, self.rates = step, rates
        self._metrics = {n: m for n, m in metrics.items() if m.metric is not None}
        self._read, self._check_finite = read, check_finite

    @property
    def learning_rate(self) -> float:
        """The learning rate of parameters without a group, or of the first optimizer of several."""
        return self.rates.get(rate_name(""), next(iter(self.rates.values())))

    @property
    def values_on_device(self) -> dict[str, Any]:
        """Return the loss and averaged metrics as arrays of the backend, without waiting for the device."""
        return dict(self.reports.values)

    @cached_property
    def _of_statistics(self) -> dict[str, float]:
        """The metrics with statistics; a metric per class has one value for each class."""
        values: dict[str, float] = {}
        for name, statistics in statistics_of(self._metrics, self.reports.statistics, self._read).items():
            values |= self._metrics[name].results(name, statistics)
        return values

    def __getitem__(self, name: str) -> float:
        if name not in self.reports.values and name in self._of_statistics:
            return self._of_statistics[name]
        if name not in list(self):
            raise KeyError(f"'{name}'; reported: {', '.join(self)}")
        value = float(self._read(self.reports.values[name]))
        if not math.isfinite(value):
            self._check_finite()
        return value

    def __iter__(self) -> Iterator[str]:
        return iter([*self.values_on_device, *self._of_statistics])

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __repr__(self) -> str:
        return f"<Report of step {self.step}: {', '.join(self)}>"
