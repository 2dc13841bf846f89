"""Optimizers around others: Lookahead, sharpness-aware minimization, gradient noise. They can be nested."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import numpy as np

from mithril import ops
from mithril.backend import Least, Positive
from mithril.graph import Builder, OptionError, TensorType
from mithril_train.optim.optimizers import Amount, Optimizer, Scalars, Slots, Wanted, like


@dataclass(frozen=True)
class OptimizerWrapper(Optimizer):
    """Base class: everything is that of the inner optimizer unless it is overridden."""

    inner: Optimizer

    def __post_init__(self) -> None:
        if self.groups or self.weight_decay:
            raise OptionError(
                f"{type(self).__name__} has no groups and no weight_decay of its own",
                hint="set them on the inner optimizer",
            )
        self.check()

    def group_of(self, name: str) -> str:
        return self.inner.group_of(name)

    def group_names(self) -> list[str]:
        return self.inner.group_names()

    def in_group(self, pattern: str) -> Optimizer:
        return replace(self, inner=self.inner.in_group(pattern))

    def rates(self, step: int) -> dict[str, float]:
        return self.inner.rates(step)

    def with_rate(self, rate: Any) -> Optimizer:
        return replace(self, inner=self.inner.with_rate(rate))

    def check_groups(self, parameters: Sequence[str]) -> None:
        self.inner.check_groups(parameters)

    @property
    def standard(self) -> bool:
        return self.inner.standard

    def slots(self, parameter: TensorType) -> Wanted:
        return self.inner.slots(parameter)

    def scalars(self, t: Any, rate: Any) -> Scalars:
        return {"inner": self.inner.scalars(t, rate)}

    def update(self, p: Any, g: Any, slots: Slots, s: Scalars) -> tuple[Any, Slots]:
        return self.inner.update(p, g, slots, {**s["inner"], "index": s["index"]})

    def gradients(self, step: Any) -> dict[str, Any]:
        return self.inner.gradients(step)


@dataclass(frozen=True)
class Lookahead(OptimizerWrapper):
    """Every ``every`` steps, move slow parameters by ``share`` toward the fast ones, and continue from there."""

    every: Positive = 5
    share: Annotated[float, Least(0, open=True)] = 0.5

    def slots(self, parameter: TensorType) -> Wanted:
        return {**self.inner.slots(parameter), "slow": (like(parameter), None)}

    def scalars(self, t: Any, rate: Any) -> Scalars:
        return {**super().scalars(t, rate), "meets": ops.equal(ops.mod(t, float(self.every)), 0.0)}

    def update(self, p: Any, g: Any, slots: Slots, s: Scalars) -> tuple[Any, Slots]:
        fast, new = super().update(p, g, {n: x for n, x in slots.items() if n != "slow"}, s)
        slow = slots["slow"] + (fast - slots["slow"]) * self.share
        return ops.where(s["meets"], slow, fast), {**new, "slow": ops.where(s["meets"], slow, slots["slow"])}


@dataclass(frozen=True)
class GradientNoise(OptimizerWrapper):
    """Add normal noise to gradients, with the standard deviation ``scale / step ** decay``."""

    scale: Amount = 0.01
    decay: Amount = 0.55
    seed: int = field(default=0, kw_only=True)

    def scalars(self, t: Any, rate: Any) -> Scalars:
        key = Builder.current().constant(np.array([self.seed & 0xFFFFFFFF, 0x6E6F6973], np.uint32))
        return {
            **super().scalars(t, rate),
            "key": ops.fold_in(key, ops.cast(t, dtype="int32")),
            "deviation": ops.exp(ops.log(t) * -self.decay) * self.scale,
        }

    def update(self, p: Any, g: Any, slots: Slots, s: Scalars) -> tuple[Any, Slots]:
        noise = ops.normal(ops.fold_in(s["key"], s["index"]), shape=g.shape, dtype=g.dtype)
        return super().update(p, g + noise * s["deviation"], slots, s)


@dataclass(frozen=True)
class SAM(OptimizerWrapper):
    """Sharpness-aware minimization: gradients at the worst point within ``radius``, which costs a second pass."""

    radius: Annotated[float, Least(0, open=True)] = 0.05

    @property
    def standard(self) -> bool:
        return False

    def gradients(self, step: Any) -> dict[str, Any]:
        ascent = self.inner.gradients(step)
        size = self.radius / (step.norm(ascent) + 1e-12)
        perturbed = {n: step.params[n] + ops.cast(g * size, dtype=step.params[n].dtype) for n, g in ascent.items()}
        return step.gradients(params=perturbed)  # type: ignore[no-any-return]
