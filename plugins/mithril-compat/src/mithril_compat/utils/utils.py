"""Sequences of different lengths as one batch per time step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def pack_data_into_time_slots(
    backend: Any,
    data: Sequence[Any],
    lengths: Any = None,
    key: Sequence[str] = ("input",),
    index: int = 0,
    return_indices: bool = False,
    sorted_data: bool = False,
) -> tuple[Any, ...]:
    """Return ``{"input0": [rows, 1, size], ...}`` for each time step, and the data by falling length.

    A step has the rows of the sequences that are long enough. ``return_indices`` also returns the order, first.
    """
    order = list(range(len(data)))
    if not sorted_data:
        order.sort(key=lambda k: -data[k][index].shape[0])  # stable
    ordered = [data[k] for k in order]
    rows = [np.asarray(backend.to_numpy(item[index])) for item in ordered]
    slots = {}
    for step in range(rows[0].shape[0]):
        alive = [row[step] for row in rows if row.shape[0] > step]
        slots[f"{key[0]}{step}"] = backend.array(np.stack(alive)[:, None, :])
    return (order, slots, ordered) if return_indices else (slots, ordered)


def unpack_time_slot_data(
    backend: Any,
    data: dict[str, Any],
    max_length: int,
    max_size: int,
    output_dim: int,
    key: str = "decoder_out",
    indices: Sequence[int] | None = None,
) -> Any:
    """Return the outputs of all time steps as [rows, steps, size]; ``indices`` restores the order of the rows."""
    steps = []
    for step in range(max_length):
        if f"{key}{step}" in data:
            x = np.asarray(backend.to_numpy(data[f"{key}{step}"]))
            steps.append(np.pad(x, [(0, max_size - x.shape[0]), (0, 0), (0, 0)]))
    rows = np.concatenate(steps, axis=-1).reshape(max_size, -1, output_dim)
    return backend.array(rows if indices is None else rows[np.argsort(indices)])
