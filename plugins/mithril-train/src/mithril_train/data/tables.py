"""Data frames and Arrow tables as columns of arrays."""

from __future__ import annotations

from typing import Any

import numpy as np


def is_table(data: Any) -> bool:
    """Whether data holds named columns of samples: an Arrow table or a Hugging Face data set."""
    return hasattr(data, "column_names") and hasattr(data, "__len__")


def columns_of_table(dataset: Any) -> dict[str, np.ndarray[Any, Any]] | None:
    """Return the columns of a pandas frame or an Arrow table by name, or None for anything else."""
    if hasattr(dataset, "iloc") and hasattr(dataset, "columns"):
        return {str(name): _plain(dataset[name].to_numpy()) for name in dataset.columns}
    if hasattr(dataset, "column_names") and hasattr(dataset, "to_pydict"):
        return {name: _arrow(dataset.column(name)) for name in dataset.column_names}
    return None


def _arrow(column: Any) -> np.ndarray[Any, Any]:
    """Convert a column; lists of one length become a matrix, other lists an array of arrays."""
    array = column.combine_chunks()
    values = getattr(array, "values", None)
    if values is not None and hasattr(array.type, "list_size"):
        return np.asarray(values.to_numpy(zero_copy_only=False)).reshape(len(array), array.type.list_size)
    return _plain(np.asarray(array.to_numpy(zero_copy_only=False)))


def _plain(column: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if column.dtype != object or not len(column) or not isinstance(column[0], (list, np.ndarray)):
        return column
    rows = [np.asarray(row) for row in column]
    return np.stack(rows) if len({row.shape for row in rows}) == 1 else _objects(rows)


def _objects(rows: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    column = np.empty(len(rows), object)
    column[:] = rows
    return column
