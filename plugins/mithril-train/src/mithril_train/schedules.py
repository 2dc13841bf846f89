"""Learning-rate schedules: functions of the step, written with operations, so that they run inside the step's graph."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from mithril.errors import OptionError
from mithril.ops import cos, less, maximum, minimum, where


class Schedule:
    """``schedule(step)``: the learning rate of the step (a float32 scalar counted from 0)."""

    def __call__(self, step: Any) -> Any:
        raise TypeError(f"{type(self).__name__} does not say what its rate is")


@dataclass(frozen=True)
class Constant(Schedule):
    """Always the same rate."""

    rate: float

    def __call__(self, step: Any) -> Any:
        return self.rate


@dataclass(frozen=True)
class Step(Schedule):
    """``rate`` times ``gamma`` after every ``every`` steps."""

    rate: float
    every: int
    gamma: float = 0.1

    def __call__(self, step: Any) -> Any:
        return self.rate * self.gamma ** (step // float(self.every))


@dataclass(frozen=True)
class Cosine(Schedule):
    """From ``rate`` down to ``final`` along half a cosine over ``steps`` steps, then ``final``."""

    rate: float
    steps: int
    final: float = 0.0

    def __call__(self, step: Any) -> Any:
        done = minimum(step / float(self.steps), 1.0)
        return self.final + (self.rate - self.final) * 0.5 * (1.0 + cos(done * math.pi))


@dataclass(frozen=True)
class WarmUp(Schedule):
    """Linearly from ``start`` to the inner schedule's rate over ``steps`` steps, then the inner schedule."""

    inner: Schedule | float
    steps: int
    start: float = 0.0

    def __call__(self, step: Any) -> Any:
        after = as_schedule(self.inner)(maximum(step - float(self.steps), 0.0))
        share = minimum(step / float(max(self.steps, 1)), 1.0)
        return self.start + (after - self.start) * share


@dataclass(frozen=True)
class OneCycle(Schedule):
    """Up from ``rate / start_factor`` to ``rate`` and down to ``rate / final_factor``, both along cosines."""

    rate: float
    steps: int
    warm: float = 0.3  # share of the steps that go up
    start_factor: float = 25.0
    final_factor: float = 1e4

    def __call__(self, step: Any) -> Any:
        start, final = self.rate / self.start_factor, self.rate / (self.start_factor * self.final_factor)
        up = float(self.warm * self.steps) - 1.0
        rising = _between(start, self.rate, minimum(step / up, 1.0))
        falling = _between(self.rate, final, minimum(maximum(step - up, 0.0) / (self.steps - 1 - up), 1.0))
        return where(less(step, up), rising, falling)


def _between(a: float, b: float, share: Any) -> Any:
    return b + (a - b) * 0.5 * (1.0 + cos(share * math.pi))


def as_schedule(rate: Schedule | float) -> Schedule:
    """A number is a constant rate."""
    if isinstance(rate, Schedule):
        return rate
    if isinstance(rate, (int, float)) and rate >= 0:
        return Constant(float(rate))
    raise OptionError(f"learning_rate={rate!r} is neither a number of at least 0 nor a schedule")
