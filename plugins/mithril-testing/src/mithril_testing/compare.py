"""Comparing results: tolerances by dtype and operation, and a message that shows the worst element."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mithril.graph import DType, dtype as as_dtype

_RELATIVE = {"float64": 1e-11, "float32": 4e-6, "float16": 4e-3, "bfloat16": 3e-2}


@dataclass(frozen=True)
class Tolerance:
    """``|got - expected| <= relative * |expected| + absolute * largest |expected|``."""

    relative: float
    absolute: float


def tolerance(dtype: DType, factor: float = 1.0) -> Tolerance:
    """Return the allowed difference of results of a dtype; zero for integers and bools."""
    base = _RELATIVE.get(dtype.name, 0.0) * factor
    return Tolerance(base, base / 4)


def assert_close(
    actual: np.ndarray[Any, Any],
    expected: np.ndarray[Any, Any],
    allowed: Tolerance,
    label: str = "result",
    unsure: float = 0.0,
    signs: bool = False,
    largest: float = np.inf,
) -> None:
    """Require the dtype, the shape, nan and infinities in their places, and all other elements within the tolerance.

    ``unsure`` is an additional difference that elements may have, whatever their size. ``signs`` compares the signs of
    zeros as well. ``largest`` bounds the size of the elements that the absolute tolerance is relative to.
    """
    assert actual.dtype == expected.dtype, f"{label}: dtype {actual.dtype}, expected {expected.dtype}"
    assert actual.shape == expected.shape, f"{label}: shape {list(actual.shape)}, expected {list(expected.shape)}"
    if not expected.size:
        return
    if not as_dtype(expected.dtype).is_float:
        wrong = actual != expected
    else:
        g, e = actual.astype(np.float64), expected.astype(np.float64)
        finite = np.isfinite(e)
        with np.errstate(all="ignore"):
            scale = min(float(np.max(np.abs(e[finite]), initial=0.0)), largest)
            close = np.abs(g - e) <= allowed.relative * np.abs(e) + allowed.absolute * scale + unsure
        alike = (np.isnan(g) & np.isnan(e)) | (g == e)
        wrong = np.where(finite, ~close, ~alike)
        if signs:
            wrong |= (g == 0) & (e == 0) & (np.signbit(g) != np.signbit(e))
    if wrong.any():
        position = np.unravel_index(int(np.argmax(wrong.ravel())), expected.shape)
        index = ", ".join(str(int(i)) for i in position)
        raise AssertionError(
            f"{label}: {int(wrong.sum())} of {expected.size} elements differ; first at [{index}]: "
            f"got {actual[position]!r}, expected {expected[position]!r} "
            f"(relative {allowed.relative:g}, absolute {allowed.absolute:g})"
        )
