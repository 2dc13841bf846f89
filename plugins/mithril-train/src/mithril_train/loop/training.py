"""The interface of a trainer for callbacks."""

from __future__ import annotations

import os
from typing import Protocol

from mithril_parallel.processes import World
from mithril_parallel.watchdog import Watchdog
from mithril_train.engine.engine import Engine
from mithril_train.step.step_config import StepConfig


class Training(Protocol):
    """A running training, implemented by ``mithril_train.loop.trainer.Trainer``."""

    engine: Engine
    world: World
    watchdog: Watchdog
    epoch: int
    steps: int
    rate_scale: float
    stopped: str
    failed: bool
    recipe: StepConfig

    def stop(self, reason: str, /) -> None: ...
    def tell(self, message: str, /) -> None: ...
    def save(self, path: str | os.PathLike[str], /) -> None: ...
