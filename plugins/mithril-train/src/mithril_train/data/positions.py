"""Positions in data: the epoch, and the number of its samples that were read.

The order of an epoch depends on the data, the seed and the epoch only. A position therefore means the same samples for
any batch size, number of workers, of processes, and engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mithril.graph import InputError

Identity = Mapping[str, Any]


def require_same(saved: Identity, current: Identity) -> None:
    """Raise if a position was saved for other data or another order than the current ones."""
    different = sorted(n for n in {**saved, **current} if saved.get(n) != current.get(n))
    if different:
        raise InputError(
            f"the position in the data belongs to other data: {', '.join(different)}",
            facts=[f"{n}: saved {saved.get(n)}, here {current.get(n)}" for n in different],
            hint="resume with the data, seed and order of the interrupted fit; to begin an epoch of other data, "
            "trainer.load(checkpoint) and fit without resume=",
        )
