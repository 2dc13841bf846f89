"""``ml.sparsify``: weights without their smallest elements, in a format that stores the others only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mithril.backend import (
    Backend,
    SparseFormat,
    check_format,
    checked,
    covers,
    packed,
    pruned_mask,
    require_match,
    to_numpy,
)
from mithril.graph import InputError, OptionError


@checked()
def sparsify(
    model_or_weights: Any,
    *,
    pattern: str = "*.weight",
    sparsity: float | None = None,
    format: SparseFormat = "auto",
) -> Any:
    """Return weights of which the smallest elements are 0, packed; a compiled model with bound parameters binds them.

    ``sparsity`` is the fraction of zeros of each weight that matches ``pattern``; without it the zeros are those that
    the weights have. ``format`` stores single elements (``"csr"``), blocks of 16 neighbors in a row (``"block1x16"``),
    or two of each four neighbors (``"2:4"``); ``"auto"`` takes the smallest format, or none if that saves less than
    half. Vectors stay unchanged; weights of more than two axes are pruned, but not packed.
    """
    sparsity = _checked(sparsity, format)
    if isinstance(model_or_weights, Mapping):
        return _sparse(model_or_weights, pattern, sparsity, format)
    weights, bind = getattr(model_or_weights, "params", None), getattr(model_or_weights, "bind", None)
    if weights is None or bind is None or not isinstance(getattr(model_or_weights, "backend", None), Backend):
        raise InputError(
            f"ml.sparsify takes weights by name, or a compiled model with bound parameters, not "
            f"{type(model_or_weights).__name__}",
            hint="compiled.bind(params) first, or ml.sparsify(params) and bind its result",
        )
    bind(_sparse(weights, pattern, sparsity, format))
    return model_or_weights


def _checked(sparsity: float | None, format: str) -> float | None:
    """Return the fraction of zeros; raise OptionError unless it is possible, and possible in this format."""
    if sparsity is not None and not 0 <= sparsity < 1:
        raise OptionError(f"sparsity={sparsity} is not a fraction of zeros, from 0 to less than 1")
    if format == "2:4" and sparsity not in (None, 0.5):
        raise OptionError(f"format='2:4' has 0.5 of its elements, not sparsity={sparsity}", hint="omit sparsity=")
    return 0.5 if format == "2:4" else sparsity


def _sparse(weights: Mapping[str, Any], pattern: str, sparsity: float | None, format: str) -> dict[str, Any]:
    """Return all weights, those that match in the format."""
    require_match("pattern=", "weight", pattern, weights)
    selected = {n: np.asarray(to_numpy(x)) for n, x in weights.items() if covers(pattern, n) and len(x.shape) > 1}
    for name, array in selected.items():
        if array.dtype != np.float32:
            raise OptionError(
                f"ml.sparsify packs float32 weights, but '{name}' is {array.dtype}",
                hint="sparsify the float32 weights, and pass precision= to the backend afterwards",
            )
        check_format(name, array.shape, format)
    result = dict(weights)
    for name, array in selected.items():
        if sparsity is not None:
            array = np.where(pruned_mask(array, sparsity, format), array, np.float32(0))
        result[name] = packed(array, format)
    return result
