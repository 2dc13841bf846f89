"""Optimizers as graphs: each update rule is a few lines of operations on one parameter, its gradient and its slots.

The rules equal ``torch.optim``'s (Lion: the paper's). ``Optimizer.update`` is traced into the training step, so every
backend that runs the model runs the update as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from typing import Any

from mithril.errors import OptionError
from mithril.ops import cast, matmul, maximum, mean, minimum, rsqrt, sign, sqrt, unsqueeze
from mithril.types import TensorType, float32
from mithril_train.schedules import Schedule, as_schedule

Slots = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """Base of all optimizers. ``groups`` overrides fields for parameters by name pattern:
    ``{"*.bias": {"weight_decay": 0.0}}``; the first pattern that matches counts."""

    weight_decay: float = 0.0
    groups: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        as_schedule(self.learning_rate)  # type: ignore[attr-defined]
        names = {f.name for f in fields(self)}
        for pattern, changes in self.groups.items():
            wrong = [n for n in changes if n not in names or n == "groups"]
            if wrong:
                raise OptionError(
                    f"group '{pattern}' sets '{wrong[0]}', which {type(self).__name__} does not have",
                    facts=["known: " + ", ".join(sorted(names - {"groups"}))],
                )

    def for_parameter(self, name: str) -> Optimizer:
        """This optimizer as it treats one parameter."""
        for pattern, changes in self.groups.items():
            if fnmatchcase(name, pattern):
                kept = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "groups"}
                return type(self)(**{**kept, **changes})
        return self

    def rate(self, step: Any) -> Any:
        """The learning rate at a step (counted from 0)."""
        return as_schedule(self.learning_rate)(step)  # type: ignore[attr-defined]

    def slots(self, parameter: TensorType) -> dict[str, tuple[TensorType, float]]:
        """What is kept between steps for a parameter: type and initial value by name."""
        return {}

    def update(self, p: Any, g: Any, slots: Slots, step: Any, rate: Any) -> tuple[Any, Slots]:
        """The new parameter and slots. ``step`` counts from 0."""
        raise TypeError(f"{type(self).__name__} has no update rule")

    def _decayed(self, p: Any, g: Any) -> Any:
        """Weight decay as an addition to the gradient."""
        return g + p * self.weight_decay if self.weight_decay else g

    def _shrunk(self, p: Any, rate: Any) -> Any:
        """Weight decay apart from the gradient."""
        return p * (1.0 - rate * self.weight_decay) if self.weight_decay else p


def _like(parameter: TensorType) -> TensorType:
    """Slots are float32 at least, whatever the parameter is stored in."""
    return parameter if parameter.dtype.bits >= 32 else TensorType(float32, parameter.shape)


@dataclass(frozen=True)
class SGD(Optimizer):
    """Stochastic gradient descent, with momentum and Nesterov's variant."""

    learning_rate: float | Schedule = 1e-2
    momentum: float = 0.0
    nesterov: bool = False

    def slots(self, parameter: TensorType) -> dict[str, tuple[TensorType, float]]:
        return {"momentum": (_like(parameter), 0.0)} if self.momentum else {}

    def update(self, p: Any, g: Any, slots: Slots, step: Any, rate: Any) -> tuple[Any, Slots]:
        g = self._decayed(p, g)
        if not self.momentum:
            return p - rate * g, slots
        buffer = slots["momentum"] * self.momentum + g
        direction = g + buffer * self.momentum if self.nesterov else buffer
        return p - rate * direction, {"momentum": buffer}


@dataclass(frozen=True)
class Adam(Optimizer):
    """Adam with bias correction; weight decay is added to the gradient."""

    learning_rate: float | Schedule = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def slots(self, parameter: TensorType) -> dict[str, tuple[TensorType, float]]:
        return {"m": (_like(parameter), 0.0), "v": (_like(parameter), 0.0)}

    def update(self, p: Any, g: Any, slots: Slots, step: Any, rate: Any) -> tuple[Any, Slots]:
        return self._adam(p, self._decayed(p, g), slots, step, rate)

    def _adam(self, p: Any, g: Any, slots: Slots, step: Any, rate: Any) -> tuple[Any, Slots]:
        m = slots["m"] * self.beta1 + g * (1.0 - self.beta1)
        v = slots["v"] * self.beta2 + (g * g) * (1.0 - self.beta2)
        t = step + 1.0
        size = rate / (1.0 - self.beta1**t)
        scale = sqrt(1.0 - self.beta2**t)
        return p - size * m / (sqrt(v) / scale + self.eps), {"m": m, "v": v}


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam whose weight decay does not pass through the moments."""

    weight_decay: float = field(default=1e-2, kw_only=True)

    def update(self, p: Any, g: Any, slots: Slots, step: Any, rate: Any) -> tuple[Any, Slots]:
        return self._adam(self._shrunk(p, rate), g, slots, step, rate)


@dataclass(frozen=True)
class Adagrad(Optimizer):
    """Rates that fall with the sum of squared gradients."""

    learning_rate: float | Schedule = 1e-2
    lr_decay: float = 0.0
    initial: float = 0.0
    eps: float = 1e-10

    def slots(self, parameter: TensorType) -> dict[str, tuple[TensorType, float]]:
        return {"sum": (_like(parameter), self.initial)}

    def update(self, p: Any, g: Any, slots: Slots, step: Any, rate: Any) -> tuple[Any, Slots]:
        g = self._decayed(p, g)
        total = slots["sum"] + g * g
        return p - (rate / (1.0 + step * self.lr_decay)) * g / (sqrt(total) + self.eps), {"sum": total}


@dataclass(frozen=True)
class RMSprop(Optimizer):
    """Gradients divided by a running root mean square."""

    learning_rate: float | Schedule = 1e-2
    alpha: float = 0.99
    eps: float = 1e-8
    momentum: float = 0.0
    centered: bool = False

    def slots(self, parameter: TensorType) -> dict[str, tuple[TensorType, float]]:
        names = ["square", *(["momentum"] if self.momentum else []), *(["mean"] if self.centered else [])]
        return {name: (_like(parameter), 0.0) for name in names}

    def update(self, p: Any, g: Any, slots: Slots, step: Any, rate: Any) -> tuple[Any, Slots]:
        g = self._decayed(p, g)
        new: Slots = {"square": slots["square"] * self.alpha + (g * g) * (1.0 - self.alpha)}
        spread = new["square"]
        if self.centered:
            new["mean"] = slots["mean"] * self.alpha + g * (1.0 - self.alpha)
            spread = spread - new["mean"] * new["mean"]
        direction = g / (sqrt(spread) + self.eps)
        if self.momentum:
            direction = new["momentum"] = slots["momentum"] * self.momentum + direction
        return p - rate * direction, new


@dataclass(frozen=True)
class Lion(Optimizer):
    """The sign of an interpolated momentum."""

    learning_rate: float | Schedule = 1e-4
    beta1: float = 0.9
    beta2: float = 0.99

    def slots(self, parameter: TensorType) -> dict[str, tuple[TensorType, float]]:
        return {"m": (_like(parameter), 0.0)}

    def update(self, p: Any, g: Any, slots: Slots, step: Any, rate: Any) -> tuple[Any, Slots]:
        direction = sign(slots["m"] * self.beta1 + g * (1.0 - self.beta1))
        m = slots["m"] * self.beta2 + g * (1.0 - self.beta2)
        return self._shrunk(p, rate) - rate * direction, {"m": m}


@dataclass(frozen=True)
class Adafactor(Optimizer):
    """Second moments factored into rows and columns, so that a matrix costs a vector's memory."""

    learning_rate: float | Schedule = 1e-2
    beta2_decay: float = -0.8
    eps1: float | None = None  # None: the dtype's machine epsilon
    eps2: float = 1e-3
    clip: float = 1.0

    def slots(self, parameter: TensorType) -> dict[str, tuple[TensorType, float]]:
        kept = _like(parameter)
        if parameter.rank < 2:
            return {"variance": (kept, 0.0)}
        rows, columns = parameter.shape[:-1], (*parameter.shape[:-2], parameter.shape[-1])
        return {"row": (TensorType(kept.dtype, rows), 0.0), "column": (TensorType(kept.dtype, columns), 0.0)}

    def update(self, p: Any, g: Any, slots: Slots, step: Any, rate: Any) -> tuple[Any, Slots]:
        eps1 = self.eps1 if self.eps1 is not None else (2.0**-52 if p.dtype.bits == 64 else 2.0**-23)
        t = step + 1.0
        share = t**self.beta2_decay
        rho = minimum(rate, rsqrt(t))
        size = maximum(sqrt(mean(p * p)), self.eps2) * rho
        square = g * g
        if "variance" in slots:
            variance = slots["variance"] + (square - slots["variance"]) * share
            new: Slots = {"variance": variance}
        else:
            row = slots["row"] + (mean(square, axis=-1) - slots["row"]) * share
            column = slots["column"] + (mean(square, axis=-2) - slots["column"]) * share
            new = {"row": row, "column": column}
            outer = matmul(unsqueeze(row, axis=(-1,)), unsqueeze(column, axis=(-2,)))
            level = maximum(mean(row, axis=-1, keepdims=True), eps1)
            variance = outer / unsqueeze(level, axis=(-1,))
        direction = g * rsqrt(maximum(variance, eps1 * eps1))
        limit = maximum(sqrt(mean(direction * direction)) / self.clip, 1.0)
        return self._shrunk(p, rate) - (size / limit) * direction, new


def apply(optimizer: Optimizer, name: str, p: Any, g: Any, slots: Slots, step: Any) -> tuple[Any, Slots]:
    """One parameter's update in float32, the parameter given back in its own dtype."""
    mine = optimizer.for_parameter(name)
    narrow = p.dtype.bits < 32
    wide = cast(p, dtype=float32) if narrow else p
    gradient = cast(g, dtype=wide.dtype) if g.dtype is not wide.dtype else g
    new, kept = mine.update(wide, gradient, slots, step, mine.rate(step))
    return (cast(new, dtype=p.dtype) if narrow else new), kept
