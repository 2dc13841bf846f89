"""Batches as columns by name, whatever the loader gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mithril.base.errors import InputError


def named(batch: Any, inputs: Sequence[str]) -> dict[str, Any]:
    """A dictionary as it is; a tuple as the model's inputs in order and then ``target``, ``target_1``, ...; an array
    as the first input."""
    if isinstance(batch, Mapping):
        return {name: _array(name, x) for name, x in batch.items()}
    if isinstance(batch, (tuple, list)) and batch and not isinstance(batch[0], (int, float, str, bytes)):
        names = [n for n in inputs if n != "is_training"]
        names = names[: len(batch)]
        extra = len(batch) - len(names)
        names += ["target" if k == 0 else f"target_{k}" for k in range(extra)]
        return {name: _array(name, x) for name, x in zip(names, batch, strict=True)}
    return {next(iter(inputs), "input"): _array("the batch", batch)}


def _array(name: str, x: Any) -> Any:
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        return x
    array = np.asarray(x)
    if array.dtype.kind not in "biuf":
        raise InputError(
            f"column '{name}' of the batch is no array of numbers",
            facts=[f"got {type(x).__name__} of {array.dtype}"],
            hint="leave it out with DataLoader(collate=...)",
        )
    if array.dtype == np.float64:
        return array.astype(np.float32)
    return array.astype(np.int32) if array.dtype == np.int64 else array


def rows(batch: Mapping[str, Any]) -> int:
    """How many samples a batch holds."""
    for x in batch.values():
        if len(x.shape):
            return int(x.shape[0])
    return 1
