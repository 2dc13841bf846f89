"""What a step does besides the model itself: the choices a trainer was made with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mithril.base.errors import OptionError
from mithril.base.patterns import matches, require_match
from mithril_train.optim.optimizers import Optimizer
from mithril_train.step.loss_binding import Measure


@dataclass(frozen=True)
class LossScale:
    """The loss is multiplied before the backward part and the gradients divided after it, so that float16 holds them.

    Dynamic: halved (and the step skipped) where a gradient is not finite, doubled after ``patience`` good steps.
    """

    initial: float = 2.0**15
    dynamic: bool = True
    patience: int = 2000
    factor: float = 2.0

    @staticmethod
    def of(given: LossScale | float | str | None) -> LossScale | None:
        if given is None or isinstance(given, LossScale):
            return given
        if given == "dynamic":
            return LossScale()
        if isinstance(given, (int, float)) and not isinstance(given, bool) and given > 0:
            return LossScale(float(given), dynamic=False)
        raise OptionError(f"loss_scale={given!r} is neither a positive number nor 'dynamic'")


@dataclass(frozen=True)
class Recipe:
    """Loss, metrics, optimizer, and what happens to gradients on the way."""

    optimizer: Optimizer
    loss: Measure | str | None = None  # a name: that output of the model; None: its only scalar
    metrics: Mapping[str, Measure] = field(default_factory=dict)
    clip_norm: float | None = None
    clip_value: float | None = None
    frozen: tuple[str, ...] = ()  # patterns of parameters that stay as they are
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
        """Whether a step with gradients that are not finite leaves everything as it was."""
        return self.detect_nan or (self.loss_scale is not None and self.loss_scale.dynamic)

    @property
    def stops(self) -> bool:
        """Whether training ends at the first step that is not finite; a loss scale finds its value by such steps."""
        return self.detect_nan and not (self.loss_scale is not None and self.loss_scale.dynamic)

    def check_patterns(self, parameters: Sequence[str]) -> None:
        """Raise where a pattern of ``frozen`` or of the optimizer's groups takes no parameter."""
        for pattern in self.frozen:
            require_match("frozen", "parameter", pattern, parameters)
        for pattern in self.optimizer.groups:
            require_match("groups", "parameter", pattern, parameters)
            if all(self.optimizer.group_of(name) != pattern for name in parameters):
                taken = next(self.optimizer.group_of(n) for n in parameters if matches(n, pattern))
                raise OptionError(
                    f"'{pattern}' in groups has no effect: all of its parameters are in the group '{taken}' before it",
                    hint=f"write '{pattern}' before '{taken}': the first pattern that matches counts",
                )

    def trains(self, name: str) -> bool:
        return not any(matches(name, pattern) for pattern in self.frozen)
