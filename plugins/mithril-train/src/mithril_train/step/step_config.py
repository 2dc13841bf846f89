"""Configuration of a training step: the settings of a trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mithril.backend import matches, require_match
from mithril.base import OptionError
from mithril_train.optim.optimizers import Optimizer
from mithril_train.step.loss_binding import ScalarFunction


@dataclass(frozen=True)
class LossScale:
    """Loss scaling: multiply the loss before the backward pass and divide the gradients after it, to fit float16.

    A dynamic scale is halved (and the step skipped) if a gradient is not finite, and doubled after ``patience`` finite
    steps.
    """

    initial: float = 2.0**15
    dynamic: bool = True
    patience: int = 2000
    factor: float = 2.0

    @staticmethod
    def of(setting: LossScale | float | str | None) -> LossScale | None:
        if setting is None or isinstance(setting, LossScale):
            return setting
        if setting == "dynamic":
            return LossScale()
        if isinstance(setting, (int, float)) and not isinstance(setting, bool) and setting > 0:
            return LossScale(float(setting), dynamic=False)
        raise OptionError(f"loss_scale={setting!r} is neither a positive number nor 'dynamic'")


@dataclass(frozen=True)
class StepConfig:
    """Loss, metrics, optimizer, and the processing of gradients."""

    optimizer: Optimizer
    loss: ScalarFunction | str | None = None  # the name of an output of the model; None: its only scalar output
    metrics: Mapping[str, ScalarFunction] = field(default_factory=dict)
    clip_norm: float | None = None
    clip_value: float | None = None
    frozen: tuple[str, ...] = ()  # patterns of parameters that are not updated
    ema: float | None = None  # decay of the moving average of parameters
    loss_scale: LossScale | None = None
    detect_nan: bool = True
    accumulate: int = 1

    def __post_init__(self) -> None:
        for name in ("clip_norm", "clip_value"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise OptionError(f"{name}={value} must be greater than 0")
        if self.ema is not None and not 0.0 < self.ema < 1.0:
            raise OptionError(f"ema={self.ema} must be between 0 and 1")
        if self.accumulate < 1:
            raise OptionError(f"gradient_accumulation_steps={self.accumulate} must be at least 1")

    @property
    def guarded(self) -> bool:
        """Whether a step whose gradients are not finite changes nothing."""
        return self.detect_nan or (self.loss_scale is not None and self.loss_scale.dynamic)

    @property
    def stops(self) -> bool:
        """Whether training ends at the first step that is not finite; a dynamic loss scale adapts instead."""
        return self.detect_nan and not (self.loss_scale is not None and self.loss_scale.dynamic)

    def check_patterns(self, parameters: Sequence[str]) -> None:
        """Raise OptionError if a pattern of ``frozen`` or of the optimizer's groups matches no parameter."""
        for pattern in self.frozen:
            require_match("frozen", "parameter", pattern, parameters)
        for pattern in self.optimizer.groups:
            require_match("groups", "parameter", pattern, parameters)
            if all(self.optimizer.group_of(name) != pattern for name in parameters):
                group = next(self.optimizer.group_of(n) for n in parameters if matches(n, pattern))
                raise OptionError(
                    f"'{pattern}' in groups has no effect: all of its parameters are in the group '{group}' before it",
                    hint=f"write '{pattern}' before '{group}': the first pattern that matches counts",
                )

    def trains(self, name: str) -> bool:
        return not any(matches(name, pattern) for pattern in self.frozen)
