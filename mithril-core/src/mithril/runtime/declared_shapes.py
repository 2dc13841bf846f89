"""Declared shapes, which may contain ``...`` for any number of axes and None for any size."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def expanded(shape: tuple[Any, ...], rank: int, axes: Sequence[Any] = ()) -> tuple[Any, ...] | None:
    """Return a declared shape with its ``...`` replaced by ``axes`` (sizes of all axes; default: None) for a rank.

    A shape without ``...`` is returned unchanged; None if the rank has too few axes.
    """
    if ... not in shape:
        return shape
    start = shape.index(...)
    stop = rank - (len(shape) - start - 1)
    if stop < start:
        return None
    middle = tuple(axes[start:stop]) if axes else (None,) * (stop - start)
    return (*shape[:start], *middle, *shape[start + 1 :])


def declared_text(shape: Iterable[Any]) -> str:
    """Return a declared shape as text: ``[B, ..., 5, any]``."""
    return f"[{', '.join('any' if s is None else '...' if s is ... else str(s) for s in shape)}]"
