"""Batches as columns by name, for all forms that loaders return."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mithril.backend import CheckedType
from mithril.graph import InputError


class LocalRows(metaclass=CheckedType):
    """A batch of which every process has other rows: process 0 has the first ones, and so on."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch


def named(batch: Any, inputs: Sequence[str]) -> dict[str, Any]:
    """Return the columns of a batch by name.

    The keys of a dictionary are names; a tuple, or a list of arrays, holds the model's inputs in order and then
    ``target``, ``target_1``, ...; an array or a list of rows is the first input.
    """
    if isinstance(batch, Mapping):
        for name in batch:
            if not isinstance(name, str):
                raise InputError(f"columns of a batch are named by strings, got {name!r} ({type(name).__name__})")
        return {name: _array(name, x) for name, x in batch.items()}
    if isinstance(batch, tuple) or (isinstance(batch, list) and batch and not is_rows(batch)):
        names = [n for n in inputs if n != "is_training"]
        names = names[: len(batch)]
        extra = len(batch) - len(names)
        names += ["target" if k == 0 else f"target_{k}" for k in range(extra)]
        return {name: _array(name, x) for name, x in zip(names, batch, strict=True)}
    return {next(iter(inputs), "input"): _array("the batch", batch)}


def is_batch(data: Any) -> bool:
    """Whether data is one batch (an array, rows of numbers, or columns) rather than an iterable of batches."""
    if isinstance(data, Mapping) or hasattr(data, "shape"):
        return True
    if isinstance(data, tuple):
        return bool(data) and all(hasattr(x, "shape") or is_rows(x) for x in data)
    return is_rows(data)


def is_rows(data: Any) -> bool:
    """Whether data is a possibly nested list of numbers."""
    if not isinstance(data, list):
        return False
    while isinstance(data, list) and data:
        data = data[0]
    return isinstance(data, (bool, int, float, np.generic))


def _array(name: str, x: Any) -> Any:
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        return x
    try:
        array = np.asarray(x)
    except ValueError:
        raise InputError(f"the rows of column '{name}' have different lengths", hint="pad them to one length") from None
    if array.dtype.kind not in "biuf":
        raise InputError(
            f"column '{name}' of the batch is not an array of numbers",
            facts=[f"got {type(x).__name__} of {array.dtype}"],
            hint=f"number the classes: names, {name} = np.unique({name}, return_inverse=True); leave out other columns "
            "with DataLoader(collate=...)",
        )
    if array.dtype == np.float64:
        return array.astype(np.float32)
    return array.astype(np.int32) if array.dtype == np.int64 else array


def size_of(batch: Any) -> int:
    """Return the number of samples in a batch as loaders return it, without converting it."""
    if isinstance(batch, Mapping):
        columns = list(batch.values())
    else:
        columns = list(batch) if isinstance(batch, tuple | list) and not is_rows(batch) else [batch]
    for x in columns:
        if hasattr(x, "shape"):
            if len(x.shape):
                return int(x.shape[0])
        elif isinstance(x, list):
            return len(x)
    return 1


def without_first(batch: Any, count: int) -> Any:
    """Return a batch without its first samples."""
    size = size_of(batch)

    def rest(x: Any) -> Any:
        length = x.shape[0] if getattr(x, "shape", ()) else len(x) if isinstance(x, list) else None
        return x[count:] if length == size else x

    if isinstance(batch, Mapping):
        return {name: rest(x) for name, x in batch.items()}
    if isinstance(batch, tuple | list) and not is_rows(batch):
        return type(batch)([rest(x) for x in batch])
    return rest(batch)


def rows(batch: Mapping[str, Any]) -> int:
    """Return the number of samples in a batch."""
    for x in batch.values():
        if len(x.shape):
            return int(x.shape[0])
    return 1


def joined(arrays: Sequence[np.ndarray[Any, Any]]) -> Any:
    """Concatenate the outputs of batches; if their rows have different sizes, return a list of rows."""
    if len(arrays) == 1:
        return arrays[0]
    if len({a.shape[1:] for a in arrays}) > 1:
        return [row for a in arrays for row in a]
    return np.concatenate(arrays) if arrays[0].ndim else np.stack(arrays)
