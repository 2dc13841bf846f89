"""Optimizers as graphs: an update rule is a few operations on one parameter, its gradient and its slots.

The rules match ``torch.optim`` (Lion: the paper). ``Optimizer.update`` is traced into the training step, so every
backend that runs the model also runs the update.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import FunctionType
from typing import Annotated, Any, ClassVar, get_type_hints

from mithril.backend import CheckedType, Least, covers, is_ours, mismatch as misfit, require_match
from mithril.graph import OptionError, TensorType, closest, float32
from mithril.ops import abs, exp, expm1, log, matmul, maximum, mean, minimum, rsqrt, sign, sqrt, unsqueeze, where
from mithril_train.optim.schedules import Schedule, as_schedule

LearningRate = float | Schedule | Callable[[int], float]
Share = Annotated[float, Least(0)]  # the class checks that it is less than 1
Amount = Annotated[float, Least(0)]
Slots = dict[str, Any]
Scalars = dict[str, Any]
Wanted = dict[str, tuple[TensorType, float | None]]  # slots by name: type and initial value, None: the parameter

DATACLASS = "@dataclass(frozen=True)"
UPDATE = ("self", "p", "g", "slots", "s")  # parameters of ``update``


@dataclass(frozen=True, kw_only=True)
class Optimizer(metaclass=CheckedType):
    """Base class of optimizers.

    ``groups`` overrides fields for parameters by name pattern, or by layer of the model: ``{"*.bias": {"weight_decay":
    0.0}}``; the first matching one applies.
    """

    argument_hints: ClassVar[Mapping[str, str]] = {
        "lr": "write learning_rate=",
        "betas": "write beta1= and beta2=",
        "params": "leave it out: the trainer knows the parameters",
        "clipnorm": "Trainer(clip_norm=...)",
        "learning_rate": f"write {DATACLASS} above the class, which makes its annotations arguments",
    }

    weight_decay: Amount = 0.0
    groups: Mapping[Any, Mapping[str, Any]] = field(default_factory=dict)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__init__" in vars(cls):
            raise OptionError(
                f"the settings of the optimizer {cls.__name__} are fields, not arguments of __init__()",
                hint=f"{DATACLASS} class {cls.__name__}(ml.Optimizer): learning_rate: float = 0.001",
            )
        if isinstance(update := vars(cls).get("update"), FunctionType):
            try:
                inspect.signature(update).bind(*UPDATE)
            except TypeError as error:
                raise OptionError(
                    f"update() of {cls.__name__} cannot be called: {error}", hint=f"def update({', '.join(UPDATE)})"
                ) from None

    def __post_init__(self) -> None:
        rate = getattr(self, "learning_rate", None)
        if rate is None:
            raise OptionError(
                f"{type(self).__name__} has no learning_rate",
                hint="use an optimizer such as ml.SGD(), or declare the field: learning_rate: float = 0.01",
            )
        as_schedule(rate)
        annotations = get_type_hints(type(self), include_extras=True) if is_ours(type(self)) else {}
        settings = {name: annotations.get(name, Any) for name in self._settings()}
        for pattern, changes in self.groups.items():
            for name, value in changes.items():
                if name not in settings:
                    suggestions = closest(name, settings, 1)
                    raise OptionError(
                        f"group '{pattern}' sets '{name}', which {type(self).__name__} does not have",
                        facts=["known: " + ", ".join(sorted(settings))],
                        hint=self.argument_hints.get(name)
                        or (f"did you mean '{suggestions[0]}'?" if suggestions else None),
                    )
                if wrong := misfit(value, settings[name]):
                    raise OptionError(f"{type(self).__name__}: group '{pattern}': {name}: {wrong}")
        self.check()

    def _settings(self) -> list[str]:
        return [f.name for f in fields(self) if f.name != "groups"]

    def check(self) -> None:
        """Raise OptionError if a setting is out of range."""
        for name in _SHARES:
            value = getattr(self, name, 0.0)
            if not value < 1.0:
                raise OptionError(f"{type(self).__name__}: {name}={value} must be at least 0 and less than 1")

    def group_of(self, name: str) -> str:
        """Return the pattern of a parameter's group, or an empty string."""
        return next((pattern for pattern in self.groups if covers(pattern, name)), "")

    def in_group(self, pattern: str) -> Optimizer:
        """Return the optimizer with the settings of one group."""
        settings = {name: getattr(self, name) for name in self._settings()}
        return type(self)(**{**settings, **self.groups[pattern]}) if pattern else self

    def rates(self, step: int) -> dict[str, float]:
        """Return the learning rates at a step by group pattern; the common one has the empty name."""
        group_rates = {"": self.learning_rate}  # type: ignore[attr-defined]
        group_rates.update(
            (p, changes["learning_rate"]) for p, changes in self.groups.items() if "learning_rate" in changes
        )
        return {pattern: as_schedule(rate)(step) for pattern, rate in group_rates.items()}

    def with_rate(self, rate: Any) -> Optimizer:
        """Return the optimizer with another learning rate of the parameters whose group does not set one."""
        return replace(self, learning_rate=rate)  # type: ignore[call-arg]

    def group_names(self) -> list[str]:
        """Return the names that ``group_of`` may return, without the empty one."""
        return list(self.groups)

    def check_groups(self, parameters: Sequence[str]) -> None:
        """Raise OptionError if a group applies to none of the parameters."""
        for pattern in self.groups:
            require_match("groups", "parameter", pattern, parameters)
            if all(self.group_of(name) != pattern for name in parameters):
                group = next(self.group_of(n) for n in parameters if covers(pattern, n))
                raise OptionError(
                    f"'{pattern}' in groups has no effect: all of its parameters are in the group '{group}' before it",
                    hint=f"write '{pattern}' before '{group}': the first pattern that matches counts",
                )

    def check_trained(self, names: Sequence[str]) -> None:
        """Raise OptionError if a parameter cannot be updated."""

    @property
    def standard(self) -> bool:
        """Whether a step is one forward and one backward pass, so that no other ``gradients`` are needed."""
        return type(self).gradients is Optimizer.gradients

    def train_step(self, step: Any) -> None:
        """Build the operations of a step; ``step`` is a ``TrainStep``."""
        step.update(self.gradients(step))

    def gradients(self, step: Any) -> dict[str, Any]:
        """Return the gradients by which a step updates, by parameter."""
        return step.gradients()  # type: ignore[no-any-return]

    def slots(self, parameter: TensorType) -> Wanted:
        """Return the initial optimizer state of a parameter, by slot name."""
        return {}

    def scalars(self, t: Any, rate: Any) -> Scalars:
        """Return the scalars that a group shares, computed from the step (float32, starting at 1) and the rate."""
        return {"rate": rate, **self._decay(rate)}

    def _decay(self, rate: Any) -> Scalars:
        """Return the factor of decoupled weight decay."""
        return {"decay": 1.0 - rate * self.weight_decay} if self.weight_decay else {}

    def update(self, p: Any, g: Any, slots: Slots, s: Scalars) -> tuple[Any, Slots]:
        """Return the new parameter and slots."""
        raise OptionError(f"{type(self).__name__} has no update rule", hint="define update(self, p, g, slots, s)")

    def _decayed(self, p: Any, g: Any) -> Any:
        """Add weight decay to the gradient."""
        return g + p * self.weight_decay if self.weight_decay else g

    def _shrunk(self, p: Any, s: Scalars) -> Any:
        """Apply decoupled weight decay."""
        return p * s["decay"] if self.weight_decay else p


_SHARES = ("momentum", "beta1", "beta2", "alpha", "rho")


def like(parameter: TensorType) -> TensorType:
    """Return the type of a slot: at least float32, regardless of the parameter's dtype."""
    return parameter if parameter.dtype.bits >= 32 else TensorType(float32, parameter.shape)


def bias_correction(beta: float, t: Any) -> Any:
    """Return 1 - beta**t, in a form that is accurate in float32, where 1 - 0.999 has an error in the fifth digit."""
    return -expm1(t * math.log(beta)) if beta else 1.0


def toward(average: Any, x: Any, share: Any) -> Any:
    """Move the average toward x by a fraction; this form needs only one new buffer."""
    return (x - average) * share + average


@dataclass(frozen=True)
class SGD(Optimizer):
    """Stochastic gradient descent with momentum and optional Nesterov acceleration."""

    learning_rate: LearningRate = 1e-2
    momentum: Share = 0.0
    nesterov: bool = False

    def check(self) -> None:
        super().check()
        if self.nesterov and not self.momentum:
            raise OptionError("SGD: nesterov=True needs a momentum")

    def slots(self, parameter: TensorType) -> Wanted:
        return {"momentum": (like(parameter), 0.0)} if self.momentum else {}

    def update(self, p: Any, g: Any, slots: Slots, s: Scalars) -> tuple[Any, Slots]:
        g = self._decayed(p, g)
        if not self.momentum:
            return p - s["rate"] * g, slots
        buffer = slots["momentum"] * self.momentum + g
        direction = g + buffer * self.momentum if self.nesterov else buffer
        return p - s["rate"] * direction, {"momentum": buffer}


@dataclass(frozen=True)
class Adam(Optimizer):
    """Adam with bias correction; weight decay is added to the gradient."""

    learning_rate: LearningRate = 1e-3
    beta1: Share = 0.9
    beta2: Share = 0.999
    eps: Amount = 1e-8

    def slots(self, parameter: TensorType) -> Wanted:
        return {"m": (like(parameter), 0.0), "v": (like(parameter), 0.0)}

    def update(self, p: Any, g: Any, slots: Slots, s: Scalars) -> tuple[Any, Slots]:
        return self._adam(p, self._decayed(p, g), slots, s)

    def scalars(self, t: Any, rate: Any) -> Scalars:
        """Apply both bias corrections to the step size and eps instead of the moments: one multiplication less."""
        root = sqrt(bias_correction(self.beta2, t)) if self.beta2 else 1.0
        return {"rate": rate, "size": rate / bias_correction(self.beta1, t) * root, "eps": root * self.eps}

    def _adam(self, p: Any, g: Any, slots: Slots, s: Scalars) -> tuple[Any, Slots]:
        m = toward(slots["m"], g, 1.0 - self.beta1)
        v = toward(slots["v"], g * g, 1.0 - self.beta2)
        return p - s["size"] * (m / (sqrt(v) + s["eps"])), {"m": m, "v": v}


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay."""

    weight_decay: Amount = field(default=1e-2, kw_only=True)

    def scalars(self, t: Any, rate: Any) -> Scalars:
        return {**super().scalars(t, rate), **self._decay(rate)}

    def update(self, p: Any, g: Any, slots: Slots, s: Scalars) -> tuple[Any, Slots]:
        return self._adam(self._shrunk(p, s), g, slots, s)


@dataclass(frozen=True)
class Adamax(Adam):
    """Adam with the largest of the decayed sizes of gradients in place of their root mean square."""

    learning_rate: LearningRate = 2e-3

    def scalars(self, t: Any, rate: Any) -> Scalars:
        return {"rate": rate, "size": rate / bias_correction(self.beta1, t)}

    def update(self, p: Any, g: Any, slots: Slots, s: Scalars) -> tuple[Any, Slots]:
        g = self._decayed(p, g)
        m = toward(slots["m"], g, 1.0 - self.beta1)
        v = maximum(slots["v"] * self.beta2, abs(g) + self.eps)
        return p - s["size"] * (m / v), {"m": m, "v": v}


@dataclass(frozen=True)
class RAdam(Adam):
    """Adam whose first steps, for which the variance of its step sizes is infinite, use the momentum alone."""

    def scalars(self, t: Any, rate: Any) -> Scalars:
        left, largest = bias_correction(self.beta2, t), 2.0 / (1.0 - self.beta2) - 1.0
        length = largest - 2.0 * t * (1.0 - left) / left
        ratio = (length - 4.0) * (length - 2.0) * largest / ((largest - 4.0) * (largest - 2.0) * length)
        # as PyTorch: shorter averages have no useful estimate of the variance (the paper takes 4)
        is_rectified = where(length > 5.0, 1.0, 0.0)
        return {
            "rate": rate,
            "size": rate / bias_correction(self.beta1, t),
            "rectified": is_rectified * sqrt(maximum(ratio, 0.0) * left),
            "plain": 1.0 - is_rectified,
        }

    def update(self, p: Any, g: Any, slots: Slots, s: Scalars) -> tuple[Any, Slots]:
        g = self._decayed(p, g)
        m = toward(slots["m"], g, 1.0 - self.beta1)
        v = toward(slots["v"], g * g, 1.0 - self.beta2)
        return p - s["size"] * m * (s["rectified"] / (sqrt(v) + self.eps) + s["plain"]), {"m": m, "v": v}


@dataclass(frozen=True)
class Adadelta(Optimizer):
    """Adadelta: step sizes from the running sizes of earlier steps and of gradients."""

    learning_rate: LearningRate = 1.0
    rho: Share = 0.9
    eps: Amount = 1e-6

    def slots(self, parameter: TensorType) -> Wanted:
        return {"square": (like(parameter), 0.0), "steps": (like(parameter), 0.0)}

    def update(self, p: Any, g: Any, slots: Slots, s: Scalars) -> tuple[Any, Slots]:
        g = self._decayed(p, g)
        square = toward(slots["square"], g * g, 1.0 - self.rho)
        step = sqrt(slots["steps"] + self.eps) / sqrt(square + self.eps) * g
        return p - s["rate"] * step, {"square": square, "steps": toward(slots["steps"], step * step, 1.0 - self.rho)}


@dataclass(frozen=True)
class Adagrad(Optimizer):
    """Adagrad: step sizes that decrease with the sum of squared gradients."""

    learning_rate: LearningRate = 1e-2
    lr_decay: Amount = 0.0
    initial: Amount = 0.0
    eps: Amount = 1e-10

    def slots(self, parameter: TensorType) -> Wanted:
        return {"sum": (like(parameter), self.initial)}

    def scalars(self, t: Any, rate: Any) -> Scalars:
        return {"rate": rate, "size": rate / (1.0 + (t - 1.0) * self.lr_decay) if self.lr_decay else rate}

    def update(self, p: Any, g: Any, slots: Slots, s: Scalars) -> tuple[Any, Slots]:
        g = self._decayed(p, g)
        total = slots["sum"] + g * g
        return p - s["size"] * (g / (sqrt(total) + self.eps)), {"sum": total}


@dataclass(frozen=True)
class RMSprop(Optimizer):
    """RMSprop: gradients divided by a running root mean square."""

    learning_rate: LearningRate = 1e-2
    alpha: Share = 0.99
    eps: Amount = 1e-8
    momentum: Share = 0.0
    centered: bool = False

    def slots(self, parameter: TensorType) -> Wanted:
        names = ["square", *(["momentum"] if self.momentum else []), *(["mean"] if self.centered else [])]
        return {name: (like(parameter), 0.0) for name in names}

    def update(self, p: Any, g: Any, slots: Slots, s: Scalars) -> tuple[Any, Slots]:
        g = self._decayed(p, g)
        new: Slots = {"square": toward(slots["square"], g * g, 1.0 - self.alpha)}
        spread = new["square"]
        if self.centered:
            new["mean"] = toward(slots["mean"], g, 1.0 - self.alpha)
            spread = spread - new["mean"] * new["mean"]
        direction = g / (sqrt(spread) + self.eps)
        if self.momentum:
            direction = new["momentum"] = slots["momentum"] * self.momentum + direction
        return p - s["rate"] * direction, new


@dataclass(frozen=True)
class Lion(Optimizer):
    """Lion: the sign of an interpolated momentum."""

    learning_rate: LearningRate = 1e-4
    beta1: Share = 0.9
    beta2: Share = 0.99

    def slots(self, parameter: TensorType) -> Wanted:
        return {"m": (like(parameter), 0.0)}

    def update(self, p: Any, g: Any, slots: Slots, s: Scalars) -> tuple[Any, Slots]:
        direction = sign(toward(slots["m"], g, 1.0 - self.beta1))
        m = toward(slots["m"], g, 1.0 - self.beta2)
        return self._shrunk(p, s) - s["rate"] * direction, {"m": m}


@dataclass(frozen=True)
class Adafactor(Optimizer):
    """Adafactor: second moments factored into rows and columns, which takes the memory of a vector per matrix."""

    learning_rate: LearningRate = 1e-2
    beta2_decay: float = -0.8
    eps1: Amount | None = None  # None: the dtype's machine epsilon
    eps2: Amount = 1e-3
    clip: Amount = 1.0

    def slots(self, parameter: TensorType) -> Wanted:
        dtype, shape = like(parameter).dtype, parameter.shape
        if len(shape) < 2:
            return {"variance": (TensorType(dtype, shape), 0.0)}
        return {
            "row": (TensorType(dtype, shape[:-1]), 0.0),
            "column": (TensorType(dtype, (*shape[:-2], shape[-1])), 0.0),
        }

    def scalars(self, t: Any, rate: Any) -> Scalars:
        share = exp(log(t) * self.beta2_decay)
        return {"rate": rate, "share": share, "size": minimum(rate, rsqrt(t)), **self._decay(rate)}

    def update(self, p: Any, g: Any, slots: Slots, s: Scalars) -> tuple[Any, Slots]:
        eps1 = self.eps1 if self.eps1 is not None else (2.0**-52 if p.dtype.bits == 64 else 2.0**-23)
        share = s["share"]
        size = maximum(sqrt(mean(p * p)), self.eps2) * s["size"]
        square = g * g
        if "variance" in slots:
            variance = toward(slots["variance"], square, share)
            new: Slots = {"variance": variance}
        else:
            row = toward(slots["row"], mean(square, axis=-1), share)
            column = toward(slots["column"], mean(square, axis=-2), share)
            new = {"row": row, "column": column}
            outer = matmul(unsqueeze(row, axis=(-1,)), unsqueeze(column, axis=(-2,)))
            level = maximum(mean(row, axis=-1, keepdims=True), eps1)
            variance = outer / unsqueeze(level, axis=(-1,))
        direction = g * rsqrt(maximum(variance, eps1 * eps1))
        limit = maximum(sqrt(mean(direction * direction)) / self.clip, 1.0)
        return self._shrunk(p, s) - (size / limit) * direction, new


BY_NAME: dict[str, type[Optimizer]] = {
    name.lower(): kind
    for name, kind in tuple(globals().items())
    if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
}


def named_optimizer(name: str) -> Optimizer:
    """Return an optimizer with its default settings by name, in any case: ``"adam"``."""
    if kind := BY_NAME.get(name.lower()):
        return kind()
    suggestions = closest(name.lower(), BY_NAME, 1)
    raise OptionError(
        f"there is no optimizer '{name}'",
        facts=["known: " + ", ".join(sorted(BY_NAME))],
        hint=f"did you mean '{suggestions[0]}'?" if suggestions else "an object such as ml.Adam(1e-3) has settings",
    )
