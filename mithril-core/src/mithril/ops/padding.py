"""Padding: constant, reflected, repeated or wrapped elements around an array."""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from typing import Any

import numpy as np

from mithril.graph import (
    OperationError,
    Pairs,
    Shape,
    ShapeError,
    Size,
    TensorType,
    assume,
    at_most,
    like,
    number,
    op,
    operation,
    sample,
)
from mithril.ops.slicing import narrow

PAD_MODES = ("constant", "reflect", "symmetric", "wrap", "edge")

COPIED = {"reflect": "reflects", "symmetric": "mirrors", "wrap": "repeats"}  # modes that copy up to a whole axis


def _pad_form(types: Sequence[TensorType | None], attributes: dict[str, Any]) -> dict[str, Any]:
    if attributes["mode"] != "constant":
        attributes["value"] = 0
    return attributes


def _pad_shape(x: Shape, *, widths: Any, mode: str, value: Any) -> Shape:
    if mode not in PAD_MODES:
        raise OperationError(f"unknown mode '{mode}' of pad", facts=["known: " + ", ".join(PAD_MODES)])
    if len(widths) != len(x):
        raise ShapeError(
            f"pad got widths for {len(widths)} axes, but the operand has rank {len(x)}",
            hint="pass one (before, after) pair per axis, (0, 0) for no padding",
        )
    for axis, (size, (before, after)) in enumerate(zip(x, widths, strict=True)):
        for width in (before, after):
            if at_most(0, width) is False:
                raise ShapeError(f"pad width {width} of axis {axis} is negative", hint="use slice to remove elements")
            if width == 0 or mode == "constant":
                continue
            if mode == "edge" and not assume(1, "<=", size, f"axis {axis} has an edge"):
                raise ShapeError(f"cannot repeat the edge of axis {axis}: its size is 0", hint="use mode='constant'")
            largest = size - 1 if mode == "reflect" else size
            if mode in COPIED and not assume(width, "<=", largest, f"axis {axis} {COPIED[mode]} its own elements"):
                verb = COPIED[mode].removesuffix("s")
                raise ShapeError(
                    f"pad width {width} of axis {axis} is too large to {verb} {size} elements",
                    facts=[f"accepted: at most {largest}"],
                )
    return tuple(before + size + after for size, (before, after) in zip(x, widths, strict=True))


@op(
    shape=_pad_shape,
    dtype=like,
    canonical=_pad_form,
    samples=[
        sample((2, 3), widths=((1, 0), (2, 3))),
        sample((2, 3), widths=((0, 1), (1, 1)), value=1.5, label="value"),
        sample((3, 4), widths=((2, 1), (0, 3)), mode="reflect", label="reflect"),
        sample((3, 4), widths=((2, 1), (0, 5)), mode="edge", label="edge"),
        sample((3, 4), widths=((3, 1), (0, 4)), mode="symmetric", label="symmetric"),
        sample((3, 4), widths=((3, 1), (0, 4)), mode="wrap", label="wrap"),
        sample((3, 4), widths=((0, 0), (0, 0)), mode="edge", label="nothing"),
    ],
    axes="*x -> *x | x[widths] whole",
    moves=True,
)
def pad(x, *, widths: Pairs, mode: str = "constant", value: number = 0):
    """x with elements added before and after each axis.

    They are ``value`` (mode "constant"), the elements mirrored without the edge ("reflect") or with it ("symmetric"),
    the elements of the other end ("wrap"), or the edge ("edge").
    """
    if mode == "constant":
        out = np.full([b + n + a for n, (b, a) in zip(x.shape, widths, strict=True)], value, x.dtype)
        out[tuple(builtins.slice(b, b + n) for n, (b, _) in zip(x.shape, widths, strict=True))] = x
        return out
    for axis, (before, after) in enumerate(widths):
        if before or after:
            n = x.shape[axis]
            position = np.arange(-int(before), n + int(after))
            clamped = np.clip(position, 0, n - 1)
            side = np.clip(position - clamped, -1, 1)  # -1 before the axis, 1 after it
            mirrored = 2 * clamped - position
            sources = {"edge": clamped, "reflect": mirrored, "symmetric": mirrored + side, "wrap": position - n * side}
            x = np.take(x, sources[mode], axis)
    return x


@pad.vjp
def _(g, y, x, *, widths, mode, value):
    for axis, (before, after) in enumerate(widths):
        if before == 0 and after == 0:
            continue
        size = x.shape[axis]
        middle = narrow(g, axis, before, before + size)
        if mode != "constant" and before != 0:
            middle = middle + _folded(narrow(g, axis, 0, before), axis, size, mode, first=True)
        if mode != "constant" and after != 0:
            last = narrow(g, axis, before + size, before + size + after)
            middle = middle + _folded(last, axis, size, mode, first=False)
        g = middle
    return (g,)


def _folded(part: Any, axis: int, size: Size, mode: str, *, first: bool) -> Any:
    """Add up the cotangent of padding at the elements from which the padding was copied."""
    offset = 1 if mode == "reflect" else 0
    if mode == "edge":
        part = operation("sum")(part, axis=axis, keepdims=True)
    elif mode != "wrap":
        part = operation("flip")(part, axis=axis)
    rest = size - part.shape[axis] - offset
    widths: list[tuple[Size, Size]] = [(0, 0)] * part.ndim
    widths[axis] = (offset, rest) if first != (mode == "wrap") else (rest, offset)
    return pad(part, widths=tuple(widths))


__all__ = ["pad"]
