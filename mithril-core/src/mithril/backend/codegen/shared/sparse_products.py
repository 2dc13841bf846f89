"""Products of sparse matrices in NumPy: each row is the product of its stored elements with the rows that they read."""
# mypy: ignore-errors

import numpy as np

from mithril.backend.codegen.shared.dialect import needs


def columns_of(values, positions):
    """Return the stored elements as a vector, and the column of each; blocks are runs of neighbors."""
    if values.ndim == 1:
        return values, positions
    width = values.shape[1]
    return values.reshape(-1), (positions[:, None] * width + np.arange(width, dtype=positions.dtype)).reshape(-1)


def consistent_places(positions, starts, columns):
    """Return positions within the columns, and starts within the stored elements, from 0 on and in order."""
    positions = np.clip(np.where(positions < 0, positions + columns, positions), 0, columns - 1)
    starts = np.clip(starts, 0, len(positions))
    starts[0] = 0
    return positions, np.sort(starts, kind="stable")  # linear, as they are in order already


@needs(columns_of, consistent_places)
def sparse_matmul(values, positions, starts, x):
    """Return the product of a sparse matrix with x."""
    width = values.shape[1] if values.ndim == 2 else 1
    positions, starts = consistent_places(positions, starts, len(x) // width)
    elements, columns = columns_of(values, positions)
    y = np.zeros((len(starts) - 1, x.shape[1]), x.dtype)
    for row in np.flatnonzero(np.diff(starts)):
        part = slice(starts[row] * width, starts[row + 1] * width)
        y[row] = elements[part] @ x[columns[part]]
    return y


@needs(columns_of, consistent_places)
def sparse_matmul_transposed(values, positions, starts, x, columns):
    """Return the product of a transposed sparse matrix with x."""
    width = values.shape[1] if values.ndim == 2 else 1
    positions, starts = consistent_places(positions, starts, columns // width)
    elements, places = columns_of(values, positions)
    y = np.zeros((columns, x.shape[1]), x.dtype)
    for row in np.flatnonzero(np.diff(starts)):
        part = slice(starts[row] * width, starts[row + 1] * width)
        np.add.at(y, places[part], np.multiply.outer(elements[part], x[row]))
    return y
