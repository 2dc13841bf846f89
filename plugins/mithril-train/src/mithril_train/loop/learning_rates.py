"""``Trainer.find_learning_rate``: losses at learning rates that grow from step to step, and the rate to begin with."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from html import escape
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from mithril.graph import InputError, OptionError
from mithril.system import notebook
from mithril_train.engine.adapters import Loader
from mithril_train.engine.nonfinite import NotFiniteError
from mithril_train.learning_curves import curves

Trainer = Any  # ``loop.trainer.Trainer``, which imports this module

SMOOTHING = 0.8  # weight of the losses before: single batches are noisy
DIVERGED = 3.0  # a rise by this multiple of the best loss ends the search; larger rates are worse


@dataclass(frozen=True)
class LearningRates:
    """The rates that were tried and the smoothed loss after a step at each; ``suggestion`` is the one to begin with."""

    rates: tuple[float, ...]
    losses: tuple[float, ...]

    @property
    def suggestion(self) -> float:
        """The rate at which the loss falls fastest, per order of magnitude of the rate."""
        fastest = self._fastest()
        if fastest is None:
            raise InputError(
                "the loss falls at none of the learning rates",
                facts=[f"loss {loss:.4g} at {rate:.2g}" for rate, loss in [*zip(self.rates, self.losses)][-1:]],
                hint="a smaller lowest=, more steps=, or a look at the loss and the data",
            )
        return fastest

    def _fastest(self) -> float | None:
        lowest = int(np.argmin(self.losses)) if self.losses else 0
        if lowest < 2:  # a slope needs points on both sides
            return None
        slopes = np.gradient(self.losses[: lowest + 1], np.log(self.rates[: lowest + 1]))
        return self.rates[int(np.argmin(slopes))]

    def picture(self, path: str | Path) -> Path:
        """Write the losses over the rates as SVG."""
        exponents = [math.log10(rate) for rate in self.rates]
        return curves(path, {"loss": (exponents, self.losses)}, title=repr(self), x="log10 of the learning rate")

    def __repr__(self) -> str:
        fastest = self._fastest()
        text = f"suggestion {fastest:.1e}" if fastest is not None else "no suggestion"
        return f"<LearningRates: {len(self.rates)} steps, {text}>"

    def _repr_html_(self) -> str:
        heading = notebook.heading(escape(repr(self)[1:-1]))
        if not self.rates:
            return heading
        with tempfile.TemporaryDirectory() as folder:
            return heading + self.picture(Path(folder) / "rates.svg").read_text()


def search_rates(trainer: Trainer, source: Loader, lowest: float, highest: float, steps: int) -> LearningRates:
    """Train some steps at growing rates and restore the trainer; a checkpoint keeps it, on every engine."""
    if not lowest < highest:
        raise OptionError(f"lowest={lowest:g} is not below highest={highest:g}")
    if trainer.world.size > 1:
        raise OptionError("find_learning_rate needs one process", hint="search on one device, then train on all")
    recipe, assigned, position = trainer.recipe, trainer._rate, source.state()
    rates: list[float] = []
    losses: list[float] = []
    with tempfile.TemporaryDirectory() as folder, closing(_endless(source)) as batches:
        first = next(batches)
        if not trainer.engine.arrays:
            trainer.begin(first)
        trainer.save(Path(folder) / "before")
        try:
            for k, batch in enumerate(islice(chain([first], batches), steps)):
                trainer.learning_rate = rate = lowest * (highest / lowest) ** (k / (steps - 1))
                loss = trainer.step(batch)["loss"]
                smooth = SMOOTHING * losses[-1] + (1 - SMOOTHING) * loss if losses else loss
                if not math.isfinite(loss) or (losses and smooth - min(losses) > DIVERGED * abs(min(losses))):
                    break
                rates.append(rate)
                losses.append(smooth)
        except NotFiniteError:
            pass  # this rate is too large, which the losses before it show
        finally:
            trainer.recipe, trainer._rate = recipe, assigned
            trainer.load(Path(folder) / "before")
            source.load_state(position, trainer.epoch)
    return LearningRates(tuple(rates), tuple(losses))


def _endless(source: Loader) -> Generator[Any, None, None]:
    """Yield batches, those of further epochs after the first one."""
    while True:
        epoch = source.batches()
        try:
            first = next(epoch, None)
            if first is None:
                raise InputError(
                    "the loader gave no batch", hint="check the data set's length, batch_size and drop_last"
                )
            yield first
            yield from epoch
        finally:
            epoch.close()
