"""Penalties on parameters: functions of a parameter that return a scalar."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from mithril import ops
from mithril.backend import CheckedType, Least

Strength = Annotated[float, Least(0)]


@dataclass(frozen=True)
class L1(metaclass=CheckedType):
    """``strength`` times the sum of magnitudes, which makes parameters sparse."""

    strength: Strength = 0.01

    def __call__(self, parameter: Any) -> Any:
        return ops.sum(ops.abs(parameter)) * self.strength


@dataclass(frozen=True)
class L2(metaclass=CheckedType):
    """``strength`` times the sum of squares, which makes parameters small."""

    strength: Strength = 0.01

    def __call__(self, parameter: Any) -> Any:
        return ops.sum(parameter * parameter) * self.strength
