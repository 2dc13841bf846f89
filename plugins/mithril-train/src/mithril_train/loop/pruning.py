"""``ml.Pruning``: a growing part of the weights becomes 0 during training, and stays 0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from mithril.backend import Least, Positive, SparseFormat, check_format, covers, pruned_mask, require_match
from mithril.graph import OptionError, UnsupportedError
from mithril_train.loop.callbacks import Array, Callback, Training

if TYPE_CHECKING:
    from mithril_train.loop.report import Report


class Pruning(Callback):
    """Set the smallest elements of the weights that match ``pattern`` to 0, more of them every ``every`` steps.

    The fraction of zeros grows from step ``start`` on, for ``steps`` steps, fast at first, to ``sparsity``. Elements,
    or blocks of ``format``, that are 0 stay 0: their gradients have no effect on weights, moments and averages.
    ``ml.sparsify(model)`` packs the weights after training.
    """

    def __init__(
        self,
        pattern: str = "*.weight",
        sparsity: Annotated[float, Least(0, open=True)] = 0.9,
        *,
        format: SparseFormat = "auto",
        start: Annotated[int, Least(0)] = 0,
        steps: Positive = 1000,
        every: Positive = 50,
    ) -> None:
        if sparsity >= 1:
            raise OptionError(f"Pruning: sparsity={sparsity} must be less than 1")
        self.pattern, self.format = pattern, format
        self.sparsity = 0.5 if format == "2:4" else sparsity
        self.start, self.steps, self.every = start, steps, every
        self.reached = 0.0  # the fraction of zeros at the last change of the masks
        self._masks: dict[str, Array] = {}
        self._factors: dict[str, Any] = {}  # on the device, by the name of the array that they multiply

    def wanted(self, step: int) -> float:
        """Return the fraction of zeros after a number of steps: a cubic curve (Zhu and Gupta, 2017)."""
        if self.format == "2:4":  # has no other fraction
            return self.sparsity if step >= self.start else 0.0
        progress = min(max((step - self.start) / self.steps, 0.0), 1.0)
        return self.sparsity * (1 - (1 - progress) ** 3)

    def begin(self, trainer: Training) -> None:
        if trainer.engine.is_distributed:
            raise UnsupportedError(
                "ml.Pruning does not prune weights that several devices hold in parts",
                hint="train on one device, or prune the trained weights by ml.sparsify",
            )
        self._factors = {}

    def step_end(self, trainer: Training, report: Report) -> None:
        engine = trainer.engine
        if not self._masks:
            require_match("pattern=", "parameter", self.pattern, engine.parameters)
        done = trainer.steps >= self.start + self.steps
        if trainer.steps >= self.start and (trainer.steps % self.every == 0 or done) and self.reached < self.sparsity:
            self._choose(engine, self.wanted(trainer.steps))
        if not self._masks:
            return
        if not self._factors:
            owners = {**{n: n for n in engine.parameters}, **{n: e.parameter for n, e in engine.extra.items()}}
            for name, owner in owners.items():
                if owner in self._masks and tuple(engine.arrays[name].shape) == self._masks[owner].shape:
                    kind = engine.backend.to_numpy(engine.arrays[name]).dtype
                    self._factors[name] = engine.backend.array(self._masks[owner].astype(kind))
        engine.arrays = {**engine.arrays, **{n: engine.arrays[n] * mask for n, mask in self._factors.items()}}

    def _choose(self, engine: Any, sparsity: float) -> None:
        """Choose the elements that stay, by magnitude; those that are 0 already are the smallest."""
        for name in engine.trained:
            shape = tuple(engine.arrays[name].shape)
            if len(shape) > 1 and covers(self.pattern, name):
                check_format(name, shape, self.format)
                weights = engine.backend.to_numpy(engine.arrays[name]).astype(np.float32)
                self._masks[name] = pruned_mask(weights, sparsity, self.format)
        self.reached, self._factors = sparsity, {}

    def end(self, trainer: Training) -> None:
        if self.reached < self.sparsity and not trainer.failed:
            after = self.start + self.steps
            trainer.tell(f"pruning reached {self.reached:.0%} of zeros: {self.sparsity:.0%} takes {after} steps")

    def state_dict(self) -> dict[str, Any]:
        return {"reached": self.reached}

    def tensors(self) -> dict[str, Array]:
        return dict(self._masks)

    def load_state_dict(self, state: Mapping[str, Any], tensors: Mapping[str, Array]) -> None:
        self.reached, self._factors = state["reached"], {}
        self._masks = {name: np.asarray(mask, bool) for name, mask in tensors.items()}
