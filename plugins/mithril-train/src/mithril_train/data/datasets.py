"""Data sources of a loader: arrays, map-style datasets and iterables behind one interface."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from zlib import crc32

import numpy as np

from mithril.backend import is_sparse, to_numpy
from mithril.graph import InputError
from mithril_train.data.tables import columns_of_table


class Source:
    """The loader's interface of a dataset. If ``length`` is None, it can only be read in order."""

    length: int | None = None

    def fetch(self, indices: np.ndarray[Any, Any]) -> Any:
        """Return the batch of these samples."""
        return default_collate(self.rows(indices))

    def rows(self, indices: np.ndarray[Any, Any]) -> list[Any]:
        """Return these samples."""
        raise TypeError("this dataset has no random access")

    def samples(self) -> Iterator[Any]:
        raise TypeError("this dataset is read by index")

    def fingerprint(self) -> dict[str, Any]:
        """Return a fingerprint of the dataset as JSON; samples of objects may be random, so they do not take part."""
        return {"length": self.length}


class Arrays(Source):
    """Arrays with a common leading size: a batch is one indexing operation per array, without a loop over samples."""

    def __init__(self, arrays: Mapping[str, Any] | Sequence[Any], *, single: bool = False) -> None:
        self.single = single  # whether a sample is a row of the only array
        self.arrays: Any
        for name, a in arrays.items() if isinstance(arrays, Mapping) else enumerate(arrays):
            if is_sparse(a):
                raise InputError(
                    f"column {name!r} of a dataset is a sparse array",
                    hint="pass its toarray(), or train batches of it by compiled.evaluate with output_gradients",
                )
        if isinstance(arrays, Mapping):
            self.arrays = {name: to_numpy(a, f"column {name!r}") for name, a in arrays.items()}
            columns = self.arrays
        else:
            self.arrays = tuple(to_numpy(a, f"column {i}") for i, a in enumerate(arrays))
            columns = dict(enumerate(self.arrays))
        lengths = {name: len(a) if a.ndim else None for name, a in columns.items()}
        if not lengths or None in lengths.values() or len(set(lengths.values())) > 1:
            raise InputError(
                "arrays of a dataset must have one leading size",
                facts=[f"{name!r}: {np.shape(a)}" for name, a in columns.items()],
            )
        self.length = next(iter(lengths.values()))

    def fingerprint(self) -> dict[str, Any]:
        """Add a checksum of the columns, of which it reads 16 rows."""
        columns = self.arrays if isinstance(self.arrays, dict) else dict(enumerate(self.arrays))
        total = 0
        for name, a in columns.items():
            total = crc32(f"{name} {a.dtype} {a.shape}".encode(), total)
            if a.dtype != object and len(a):
                total = crc32(a[np.linspace(0, len(a) - 1, 16).astype(int)].tobytes(), total)
        return {**super().fingerprint(), "content": total}

    def fetch(self, indices: np.ndarray[Any, Any]) -> Any:
        if isinstance(self.arrays, dict):
            return {name: _rows_of(a, indices) for name, a in self.arrays.items()}
        return tuple(_rows_of(a, indices) for a in self.arrays)

    def rows(self, indices: np.ndarray[Any, Any]) -> list[Any]:
        return [self._row(int(i)) for i in indices]

    def _row(self, i: int) -> Any:
        if isinstance(self.arrays, dict):
            return {name: a[i] for name, a in self.arrays.items()}
        return self.arrays[0][i] if self.single else tuple(a[i] for a in self.arrays)


class Indexed(Source):
    """A map-style dataset: ``dataset[i]`` and ``len(dataset)``."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.length = len(dataset)

    def rows(self, indices: np.ndarray[Any, Any]) -> list[Any]:
        many = getattr(self.dataset, "__getitems__", None)
        return list(many([int(i) for i in indices]) if many else [self.dataset[int(i)] for i in indices])


class Streamed(Source):
    """An iterable or generator function, read in its own order."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def fingerprint(self) -> dict[str, Any]:
        """Add the checksum of ``ml.TarStream``."""
        content = getattr(self.dataset, "fingerprint", None)
        return {**super().fingerprint(), "content": content() if callable(content) else None}

    def samples(self) -> Iterator[Any]:
        is_function = callable(self.dataset) and not hasattr(self.dataset, "__iter__")
        samples = self.dataset() if is_function else self.dataset
        if not hasattr(samples, "__iter__"):
            raise InputError(
                f"the data set's function returned a {type(samples).__name__}, expected samples to iterate over",
                hint="write a generator function: yield each sample",
            )
        return iter(samples)


def _rows_of(column: np.ndarray[Any, Any], indices: np.ndarray[Any, Any]) -> Any:
    """Return rows of a column; rows of different sizes raise as such."""
    rows = column[indices]
    return default_collate(list(rows)) if column.dtype == object else rows


def as_source(dataset: Any) -> Source:
    """Return the interface of a dataset."""
    if isinstance(dataset, Source):
        return dataset
    table = columns_of_table(dataset)
    if table is not None:
        return Arrays(table)
    if isinstance(dataset, np.ndarray | Mapping) or _is_columns(dataset):
        single = isinstance(dataset, np.ndarray)
        return Arrays((dataset,) if single else dataset, single=single)
    if hasattr(dataset, "iloc"):
        raise InputError(
            f"a {type(dataset).__name__} is read by labels, not by positions",
            hint="DataLoader(series.to_numpy('float32')), or a data frame",
        )
    if isinstance(dataset, (str, bytes)):
        raise InputError(
            f"a {type(dataset).__name__} is not a data set", hint="read the file first, for example with np.load"
        )
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        return Indexed(dataset)
    if hasattr(dataset, "__iter__") or callable(dataset):
        return Streamed(dataset)
    raise InputError(
        f"a {type(dataset).__name__} is not a dataset",
        facts=[
            "accepted: arrays (dict or tuple), data frames, Arrow tables,",
            "objects with [] and len(), iterables, generator functions",
        ],
    )


def _is_columns(dataset: Any) -> bool:
    is_tuple = isinstance(dataset, tuple) and bool(dataset)
    return is_tuple and all(hasattr(a, "shape") or isinstance(a, list) for a in dataset)


def default_collate(rows: Sequence[Any]) -> Any:
    """Stack samples into a batch. Tuples and dictionaries hold columns; arrays, numbers and lists are stacked."""
    first = rows[0]
    if isinstance(first, Mapping):
        _expect_alike([sorted(map(str, row)) for row in rows], "columns")
        return {key: default_collate([row[key] for row in rows]) for key in first}
    if isinstance(first, tuple):
        _expect_alike([len(row) for row in rows], "numbers of columns")
        return tuple(default_collate(column) for column in zip(*rows, strict=True))
    if isinstance(first, (str, bytes)):
        return list(rows)
    arrays = [_array(row) for row in rows]
    shapes = {a.shape for a in arrays}
    if len(shapes) > 1:
        raise InputError(
            "samples of one batch have different shapes",
            facts=[", ".join(map(str, sorted(shapes)[:6]))],
            hint="DataLoader(..., collate=ml.Padding())",
        )
    return np.stack(arrays)


def _expect_alike(forms: Sequence[Any], kind: str) -> None:
    other = next((form for form in forms if form != forms[0]), None)
    if other is not None:
        raise InputError(
            f"samples of one batch have different {kind}: {forms[0]} and {other}",
            hint="return samples of one form, or pass DataLoader(collate=...) a function that combines them",
        )


def _array(x: Any) -> np.ndarray[Any, Any]:
    try:
        array = to_numpy(x, "a sample")
    except ValueError:
        raise InputError(
            "a sample that is a list holds parts of different shapes: a list is one row of numbers",
            hint="return a tuple or a dictionary for several columns",
        ) from None
    if isinstance(x, (float, list)) and array.dtype == np.float64:
        return array.astype(np.float32)
    return array
