"""Comparison of results of an import with the types that the source declares for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mithril.graph import Value, shape_text

Agree = Callable[[Any, Any], bool]  # of a size here and the declared one


def type_text(dtype: Any, shape: Sequence[Any] | None) -> str:
    """Return a type for messages: ``float32[N, 3]``, or the dtype if the rank is unknown."""
    return f"{dtype}{'' if shape is None else shape_text(tuple(shape))}"


def other_type(result: Any, dtype: Any, shape: Sequence[Any] | None, agree: Agree, actual: Any = None) -> str | None:
    """Return the type of a tensor as text if it is not the declared one, else None.

    ``actual`` replaces its dtype, as that of sizes, which have none.
    """
    if not isinstance(result, (Value, np.ndarray)):
        return "not computed"
    kind = result.dtype if actual is None else actual
    fits = shape is None or (
        len(shape) == len(result.shape) and all(agree(a, b) for a, b in zip(result.shape, shape, strict=True))
    )
    return None if str(kind) == str(dtype) and fits else type_text(kind, result.shape)
