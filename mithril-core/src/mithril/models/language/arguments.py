"""Constructor arguments common to many layers: (in, out) sizes, and one value for all axes or one per axis."""

from __future__ import annotations

from typing import Any

from mithril.graph import ModelError, ShapeError, Size, Value, assume
from mithril.models.language.layer import Layer


def in_and_out(
    title: str, sizes: tuple[Any, ...], dimension: int | None, name: str = "features"
) -> tuple[int | None, int]:
    """Return input and output size: ``(64)`` is the output size, ``(128, 64)`` both; ``dimension=`` is the output."""
    inner, out = in_and_out_or_weight(title, sizes, dimension, name)
    if out is None:
        raise ModelError(f"{title} needs its number of {name}", hint=f"write {title}(64)")
    return inner, out


def in_and_out_or_weight(
    title: str, sizes: tuple[Any, ...], dimension: int | None, name: str
) -> tuple[int | None, int | None]:
    """Return the sizes as ``in_and_out`` does; None is the size of the layer's weight."""
    if len(sizes) > 2:
        raise ModelError(
            f"{title} takes at most 2 sizes, got {len(sizes)}", facts=[f"accepted: {title}(out) or {title}(in, out)"]
        )
    for size in (*sizes, dimension):
        if size is not None:
            positive(title, name, size)
    if not sizes and dimension is None:
        raise ModelError(f"{title} needs its number of {name}", hint=f"write {title}(64)")
    out = sizes[-1] if sizes else dimension
    if dimension is not None and dimension != out:
        raise ModelError(
            f"{title}: dimension={dimension} conflicts with the positional {name}",
            facts=[f"got {', '.join(map(str, sizes))}: the last one is the output size"],
            hint="pass the output size only once",
        )
    return (sizes[0] if len(sizes) == 2 else None), out


def size_or_weight(layer: Layer, size: int | None, axis: int, description: str) -> Size:
    """Return the size, else that of the weight that the layer is given; raise ModelError without one."""
    if size is not None:
        return size
    shape, title = layer.given_shape("weight"), type(layer).__name__
    if shape is None:
        raise ModelError(
            f"{title}(None) takes its number of {description} from a weight, but has none",
            hint=f"write the number, connect a weight ({title}(None)(x, weight=w)), or set model.pretrained",
        )
    if len(shape) <= axis:
        raise ShapeError(f"the weight of {layer!r} has the shape {list(shape)}, without axis {axis}")
    of_weight: Size = shape[axis]
    return of_weight


def positive(title: str, argument: str, value: Any) -> int:
    """Return the value if it is a positive int; raise ModelError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"{title}: {argument} must be a positive int, got {value!r}")
    return value


def probability(title: str, p: Any) -> float:
    if isinstance(p, bool) or not isinstance(p, (int, float)) or not 0 <= p < 1:
        raise ModelError(f"{title}: p must be at least 0 and less than 1, got {p!r}")
    return float(p)


def per_axis(title: str, argument: str, value: Any, rank: int, low: int = 1) -> tuple[int, ...]:
    """Return one int per axis: ``3`` becomes ``(3, 3)``."""
    values = (value,) * rank if isinstance(value, int) else value
    is_valid = isinstance(values, (tuple, list)) and len(values) == rank
    if not is_valid or any(isinstance(v, bool) or not isinstance(v, int) or v < low for v in values):
        raise ModelError(f"{title}: {argument} must be an int of at least {low}, or {rank} of them; got {value!r}")
    return tuple(values)


def paddings(title: str, value: Any, kernel: tuple[int, ...], dilation: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Return (before, after) pairs for each axis from an int, ints per axis, pairs, "same" or "valid"."""
    rank = len(kernel)
    if isinstance(value, str) and value == "valid":
        return ((0, 0),) * rank
    if isinstance(value, str) and value == "same":
        totals = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        return tuple((t // 2, t - t // 2) for t in totals)
    if isinstance(value, (tuple, list)) and value and all(isinstance(v, (tuple, list)) for v in value):
        pairs = [per_axis(title, "padding", pair, 2, low=0) for pair in value]
        if len(pairs) != rank:
            raise ModelError(f"{title}: padding has {len(pairs)} pairs, expected {rank}")
        return tuple((a, b) for a, b in pairs)
    return tuple((p, p) for p in per_axis(title, "padding", value, rank, low=0))


def expect_rank(x: Value, *ranks: int, layout: str) -> None:
    """Raise unless the input has one of the ranks."""
    if x.ndim not in ranks:
        raise ShapeError(
            f"the input has rank {x.ndim}, expected {' or '.join(map(str, ranks))}",
            facts=[f"input {x.type}", f"expected {layout}"],
        )


def expect_size(x: Value, axis: int, expected: int | None, description: str) -> Size:
    """Return the size of an axis; raise ShapeError if the layer was created for another size."""
    if not -x.ndim <= axis < x.ndim:
        raise ShapeError(f"the input has no axis {axis} for the {description}", facts=[f"input {x.type}"])
    size = x.shape[axis]
    if expected is not None and not assume(size, "==", expected, f"the layer was created for this many {description}"):
        is_last = axis == 1 and x.ndim > 2 and x.shape[-1] == expected
        raise ShapeError(
            f"the input has {size} {description}, but the layer was created for {expected}",
            facts=[f"input {x.type}"],
            hint=f"{description} are axis 1 here, and may be the last one: np.moveaxis(x, -1, 1)" if is_last else None,
        )
    return size if expected is None else expected
