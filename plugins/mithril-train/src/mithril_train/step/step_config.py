"""Configuration of a training step: the settings of a trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mithril.backend import covers, require_match
from mithril.graph import OptionError, unknown
from mithril_train.optim.optimizers import Optimizer
from mithril_train.optim.parts import Parts
from mithril_train.step.loss_binding import ScalarFunction


def loss_name(output: str) -> str:
    """Return the name of the report of one of several losses, by output or by pattern of parameters."""
    stem = output.removesuffix("*").removesuffix(".")
    return stem if stem.endswith("loss") else f"{stem}_loss"


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
    # a function, functions by name, the name of an output of the model, or None for its only scalar output
    loss: ScalarFunction | Mapping[str, ScalarFunction] | str | None = None
    loss_weights: Mapping[str, float] = field(default_factory=dict)
    regularizers: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)  # by pattern of parameters
    metrics: Mapping[str, ScalarFunction] = field(default_factory=dict)
    clip_norm: float | None = None
    clip_value: float | None = None
    frozen: tuple[str, ...] = ()  # patterns of parameters that are not updated
    ema: float | None = None  # decay of the moving average of parameters
    loss_scale: LossScale | None = None
    detect_nan: bool = True
    accumulate: int = 1
    program: Callable[[Any], None] | None = None  # builds the step, if it is not one forward and one backward pass

    def __post_init__(self) -> None:
        for name in ("clip_norm", "clip_value"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise OptionError(f"{name}={value} must be greater than 0")
        if self.ema is not None and not 0.0 < self.ema < 1.0:
            raise OptionError(f"ema={self.ema} must be between 0 and 1")
        if self.program is not None and (self.accumulate > 1 or self.loss_scale is not None):
            name = "loss_scale" if self.loss_scale is not None else "gradient_accumulation_steps"
            raise OptionError(
                f"{name} needs a step of one forward and one backward pass",
                facts=["this one has an own train_step, a loss for each optimizer, or SAM"],
                hint=f"leave out {name}",
            )
        names = list(self.loss) if isinstance(self.loss, Mapping) else []
        for name in self.loss_weights:
            if name not in names:
                message, facts, hint = unknown("loss", name, names)
                raise OptionError(
                    f"loss_weights: {message}", facts=facts, hint=hint or 'loss={"logits": ...}, by output'
                )
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
        for pattern in self.regularizers:
            require_match("regularizers", "parameter", pattern, parameters)
        self.optimizer.check_groups(parameters)
        self.optimizer.check_trained([name for name in parameters if self.trains(name)])

    @property
    def loss_of_part(self) -> Mapping[str, str]:
        """The report of the loss of each optimizer, if the losses have the patterns of the optimizers."""
        if (
            isinstance(self.loss, Mapping)
            and isinstance(self.optimizer, Parts)
            and self.loss.keys() == self.optimizer.optimizers.keys()
        ):
            return {pattern: loss_name(pattern) for pattern in self.loss}
        return {}

    def trains(self, name: str) -> bool:
        return not any(covers(pattern, name) for pattern in self.frozen)
