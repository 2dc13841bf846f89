"""What a loader can read: arrays, map-style datasets, iterables; one interface over them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mithril.base.errors import InputError


class Source:
    """A dataset as the loader sees it. ``length`` None: it can only be read in order."""

    length: int | None = None

    def fetch(self, indices: np.ndarray[Any, Any]) -> Any:
        """The batch of these samples, already collated."""
        raise TypeError("this dataset has no random access")

    def samples(self) -> Iterator[Any]:
        raise TypeError("this dataset is read by index")


class Arrays(Source):
    """Arrays of one leading size: a batch is one fancy index per array, no Python loop over samples."""

    def __init__(self, arrays: Mapping[str, Any] | Sequence[Any]) -> None:
        self.arrays: Any
        if isinstance(arrays, Mapping):
            self.arrays = {name: np.asarray(a) for name, a in arrays.items()}
            columns = self.arrays
        else:
            self.arrays = tuple(np.asarray(a) for a in arrays)
            columns = dict(enumerate(self.arrays))
        lengths = {name: len(a) if a.ndim else None for name, a in columns.items()}
        if not lengths or None in lengths.values() or len(set(lengths.values())) > 1:
            raise InputError(
                "arrays of a dataset must have one leading size",
                facts=[f"{name!r}: {np.shape(a)}" for name, a in columns.items()],
            )
        self.length = next(iter(lengths.values()))

    def fetch(self, indices: np.ndarray[Any, Any]) -> Any:
        if isinstance(self.arrays, dict):
            return {name: a[indices] for name, a in self.arrays.items()}
        return tuple(a[indices] for a in self.arrays)


class Indexed(Source):
    """A map-style dataset: ``dataset[i]`` and ``len(dataset)``."""

    def __init__(self, dataset: Any, collate: Any) -> None:
        self.dataset, self.collate = dataset, collate
        self.length = len(dataset)

    def fetch(self, indices: np.ndarray[Any, Any]) -> Any:
        many = getattr(self.dataset, "__getitems__", None)
        rows = many([int(i) for i in indices]) if many else [self.dataset[int(i)] for i in indices]
        return self.collate(rows)


class Streamed(Source):
    """An iterable or generator function: samples in the order it gives them."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def samples(self) -> Iterator[Any]:
        is_function = callable(self.dataset) and not hasattr(self.dataset, "__iter__")
        return iter(self.dataset() if is_function else self.dataset)


def as_source(dataset: Any, collate: Any) -> Source:
    """The interface for whatever was given as a dataset."""
    if isinstance(dataset, Source):
        return dataset
    if isinstance(dataset, np.ndarray):
        return Arrays((dataset,))
    if isinstance(dataset, Mapping) or (
        isinstance(dataset, tuple) and dataset and all(hasattr(a, "shape") or isinstance(a, list) for a in dataset)
    ):
        return Arrays(dataset)
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        return Indexed(dataset, collate)
    if hasattr(dataset, "__iter__") or callable(dataset):
        return Streamed(dataset)
    raise InputError(
        f"a {type(dataset).__name__} is no dataset",
        facts=["accepted: arrays (dict or tuple), objects with [] and len(), iterables, generator functions"],
    )


def collate(rows: Sequence[Any]) -> Any:
    """Samples stacked into a batch: arrays, numbers, tuples and dictionaries of them."""
    first = rows[0]
    if isinstance(first, Mapping):
        return {key: collate([row[key] for row in rows]) for key in first}
    if isinstance(first, (tuple, list)) and not isinstance(first, str):
        return tuple(collate(column) for column in zip(*rows, strict=True))
    if isinstance(first, (str, bytes)):
        return list(rows)
    arrays = [_array(row) for row in rows]
    shapes = {a.shape for a in arrays}
    if len(shapes) > 1:
        raise InputError(
            "samples of one batch have different shapes",
            facts=[", ".join(map(str, sorted(shapes)[:6]))],
            hint="pad them, or give DataLoader(collate=...) a function that does",
        )
    return np.stack(arrays)


def _array(x: Any) -> np.ndarray[Any, Any]:
    if hasattr(x, "detach"):
        x = x.detach().cpu().numpy()
    array = np.asarray(x)
    if isinstance(x, float):
        return array.astype(np.float32)
    return array
