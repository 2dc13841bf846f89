"""Sequences of several lengths: padding with masks, and batches of similar lengths."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mithril.backend import CheckedType, Positive, to_numpy
from mithril.graph import InputError, OptionError, closest
from mithril_train.data.datasets import default_collate
from mithril_train.data.shuffle import permutation

Array = np.ndarray[Any, Any]


class Padding(metaclass=CheckedType):
    """A ``collate`` that pads sequences along their first axis, and adds a mask of the elements that are there.

    The common length is the smallest of ``sizes`` that holds the longest sequence of the batch, so that few shapes are
    compiled, or this length itself. ``columns`` are the columns to pad; the default is every column whose rows have
    different lengths somewhere, or have the length of the first column. The mask is a column of this name if rows are
    dictionaries (``"sample_weight"`` also weights the loss), and the last element if they are tuples.
    """

    def __init__(
        self,
        sizes: Sequence[int] = (),
        *,
        columns: Sequence[str] | None = None,
        value: float = 0,
        mask: str | None = "mask",
        truncate: bool = False,
    ) -> None:
        self.sizes, self.columns, self.value = sorted(sizes), columns, value
        self.mask, self.truncate = mask, truncate

    def __call__(self, rows: list[Any]) -> Any:
        first = rows[0]
        if isinstance(first, Mapping):
            table = {name: [row[name] for row in rows] for name in first}
        elif isinstance(first, tuple):
            table = {str(k): list(column) for k, column in enumerate(zip(*rows, strict=True))}
        else:
            table = {"0": list(rows)}
        padded, mask = self._padded(table)
        if isinstance(first, Mapping):
            return padded if self.mask is None else {**padded, self.mask: mask}
        values = tuple(padded.values()) if self.mask is None else (*padded.values(), mask)
        return values[0] if len(values) == 1 else values

    def _padded(self, table: Mapping[str, list[Any]]) -> tuple[dict[str, Any], Array]:
        names = self._names(table)
        sequences = {name: [to_numpy(row, "a sequence") for row in table[name]] for name in names}
        lengths = np.array([len(row) for row in sequences[names[0]]])
        size = self._size(int(max(len(row) for rows in sequences.values() for row in rows)))
        padded = {
            name: np.stack([self._fit(row, size) for row in sequences[name]])
            if name in names
            else default_collate(rows)
            for name, rows in table.items()
        }
        mask = (np.arange(size) < np.minimum(lengths, size)[:, None]).astype(np.float32)
        return padded, mask

    def _names(self, table: Mapping[str, list[Any]]) -> list[str]:
        if self.columns is not None:
            for name in self.columns:
                if name not in table:
                    suggestions = closest(name, list(table), 1)
                    raise OptionError(
                        f"Padding: the rows have no column '{name}'",
                        facts=["columns: " + ", ".join(table)],
                        hint=f"did you mean '{suggestions[0]}'?" if suggestions else None,
                    )
            return list(self.columns)
        counts = {name: [np.shape(row)[:1] for row in rows] for name, rows in table.items()}
        sequences = [name for name, shapes in counts.items() if all(shapes)]
        if not sequences:
            raise InputError("Padding: no column holds sequences", facts=["columns: " + ", ".join(table)])
        return [n for n in sequences if len(set(counts[n])) > 1 or counts[n] == counts[sequences[0]]]

    def _size(self, longest: int) -> int:
        size = next((s for s in self.sizes if s >= longest), None)
        if size is not None or not self.sizes:
            return size or longest
        if not self.truncate:
            raise InputError(
                f"a sequence has length {longest}, and the largest size is {self.sizes[-1]}",
                hint="add a size, or write Padding(..., truncate=True)",
            )
        return self.sizes[-1]

    def _fit(self, row: Array, size: int) -> Array:
        row = row[:size]
        full = np.full((size, *row.shape[1:]), self.value, np.float32 if row.dtype == np.float64 else row.dtype)
        full[: len(row)] = row
        return full


class Buckets(metaclass=CheckedType):
    """Batches of samples with similar lengths: ``lengths`` of all samples, and the largest length of each bucket."""

    def __init__(self, lengths: Sequence[int] | Array, sizes: Sequence[Positive]) -> None:
        self.lengths, self.sizes = np.asarray(lengths), np.array(sorted(sizes), np.int64)
        if self.lengths.ndim != 1 or self.lengths.dtype.kind not in "iu" or not len(self.sizes):
            raise OptionError(
                "Buckets expects an int per sample, and sizes", hint="ml.Buckets([len(r) for r in rows], [32, 64])"
            )
        longest = int(self.lengths.max(initial=0))
        if longest > self.sizes[-1]:
            raise OptionError(
                f"Buckets: a sample has length {longest}, and the largest size is {self.sizes[-1]}",
                hint=f"add a size of at least {longest}",
            )

    def batches(
        self, order: Array, size: int, drop_last: bool, shuffle: tuple[int, int] | None, start: int
    ) -> Iterator[Array]:
        """Yield batches of indices in the given order within each bucket; ``shuffle`` is a seed and an epoch.

        The batches of the first ``start`` samples are left out.
        """
        groups = self.groups(order, size, drop_last)
        if shuffle is not None:
            groups = [groups[k] for k in permutation(len(groups), *shuffle)]
        for group in groups:
            if start <= 0:
                yield group
            start -= len(group)

    def groups(self, order: Array, size: int, drop_last: bool) -> list[Array]:
        """Return the batches, shortest samples first."""
        if len(order) and int(order.max()) >= len(self.lengths):
            raise OptionError(f"Buckets has {len(self.lengths)} lengths, and the data set is longer")
        bucket = np.searchsorted(self.sizes, self.lengths[order])
        groups = []
        for k in range(len(self.sizes)):
            members = order[bucket == k]
            end = len(members) - len(members) % size if drop_last else len(members)
            groups += [members[i : i + size] for i in range(0, end, size)]
        return groups
