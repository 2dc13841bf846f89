"""Learning-rate schedules: functions of the step, computed in double precision and passed to the step as an input."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from mithril.backend import CheckedType, Least, Positive
from mithril.graph import OptionError

Rate = Annotated[float, Least(0)]


class Schedule(metaclass=CheckedType):
    """Base class: ``schedule(step)`` is the learning rate of a step; the first step is 0."""

    @abstractmethod
    def __call__(self, step: int) -> float:
        """Return the learning rate of a step."""


@dataclass(frozen=True)
class Constant(Schedule):
    """A constant rate."""

    rate: Rate

    def __call__(self, step: int) -> float:
        return self.rate


@dataclass(frozen=True)
class StepDecay(Schedule):
    """``rate``, multiplied by ``gamma`` every ``every`` steps."""

    rate: Rate
    every: Positive
    gamma: float = 0.1

    def __call__(self, step: int) -> float:
        return float(self.rate * self.gamma ** (step // self.every))


@dataclass(frozen=True)
class Cosine(Schedule):
    """Cosine decay from ``rate`` to ``final`` over ``steps`` steps, then ``final``."""

    rate: Rate
    steps: Positive
    final: float = 0.0

    def __call__(self, step: int) -> float:
        return _between(self.rate, self.final, min(step / self.steps, 1.0))


@dataclass(frozen=True)
class WarmUp(Schedule):
    """Linear warm-up from ``start`` to the initial rate of the inner schedule over ``steps`` steps, then that one."""

    inner: Schedule | Rate | Callable[[int], float]
    steps: Positive
    start: float = 0.0

    def __post_init__(self) -> None:
        as_schedule(self.inner)

    def __call__(self, step: int) -> float:
        inner = as_schedule(self.inner)
        if step >= self.steps:
            return inner(step - self.steps)
        return self.start + (inner(0) - self.start) * step / self.steps


@dataclass(frozen=True)
class OneCycle(Schedule):
    """One cycle: up from ``rate / start_factor`` to ``rate``, then down to ``rate / final_factor``, along cosines."""

    rate: Rate
    steps: Annotated[int, Least(2)]
    warm: float = 0.3  # fraction of the steps with an increasing rate
    start_factor: float = 25.0
    final_factor: float = 1e4

    def __post_init__(self) -> None:
        if not 0.0 < self.warm < 1.0:
            raise OptionError(f"OneCycle: expected warm between 0 and 1, got {self.warm}")

    def __call__(self, step: int) -> float:
        start, last = self.rate / self.start_factor, self.steps - 1
        top = self.warm * self.steps - 1.0
        if step <= top:
            return _between(start, self.rate, step / top if top > 0 else 1.0)
        return _between(self.rate, start / self.final_factor, min((step - top) / (last - top), 1.0))


@dataclass(frozen=True)
class Polynomial(Schedule):
    """Decay from ``rate`` to ``final`` over ``steps`` steps along a power (1: a line), then ``final``."""

    rate: Rate
    steps: Positive
    power: Annotated[float, Least(0, open=True)] = 1.0
    final: Rate = 0.0

    def __call__(self, step: int) -> float:
        left = 1.0 - min(step / self.steps, 1.0)
        return float(self.final + (self.rate - self.final) * left**self.power)


@dataclass(frozen=True)
class Cyclic(Schedule):
    """Cycles of ``2 * steps`` steps: up from ``low`` to ``high`` along a line and down again.

    ``decay`` multiplies the height of each cycle: 1 repeats the first, 0.5 halves every next one.
    """

    low: Rate
    high: Rate
    steps: Positive
    decay: Annotated[float, Least(0)] = 1.0

    def __call__(self, step: int) -> float:
        cycle, position = divmod(step, 2 * self.steps)
        share = 1.0 - abs(position / self.steps - 1.0)
        return float(self.low + (self.high - self.low) * share * self.decay**cycle)


def _between(a: float, b: float, share: float) -> float:
    """Interpolate from a (fraction 0) to b (fraction 1) along half a cosine."""
    return b + (a - b) * 0.5 * (1.0 + math.cos(math.pi * share))


def as_schedule(rate: Schedule | float | Callable[[int], float]) -> Schedule:
    """Convert a number (constant rate) or a function of the step to a schedule."""
    if isinstance(rate, Schedule):
        return rate
    if isinstance(rate, (int, float)) and not isinstance(rate, bool) and rate >= 0:
        return Constant(float(rate))
    if callable(rate):
        return _Function(rate)
    raise OptionError(
        f"learning_rate={rate!r} is not a learning rate",
        facts=["accepted: a number of at least 0, a schedule, a function of the step"],
    )


@dataclass(frozen=True)
class _Function(Schedule):
    """A schedule from a function of the user."""

    function: object

    def __call__(self, step: int) -> float:
        return float(self.function(step))  # type: ignore[operator]
