"""Layers that rearrange or select elements: Identity, Dropout, Flatten, Reshape, Concat, Split, Pad, ..."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mithril import ops
from mithril.graph import ModelError, ShapeError, Value, at_most, is_static, normalize_axis, product
from mithril.models.language.arguments import positive, probability
from mithril.models.language.layer import Layer


class Identity(Layer):
    """The identity: returns its input unchanged."""

    def build(self, x: Value) -> Any:
        return x


class Dropout(Layer):
    """In training, zeroes elements with probability p and scales the others by 1 / (1 - p)."""

    def __init__(self, p: float = 0.5) -> None:
        self.p = probability("Dropout", p)

    def build(self, x: Value) -> Any:
        if self.p == 0 or not self.training:
            return x
        return ops.dropout(x, self.key(), p=self.p)


class Flatten(Layer):
    """Axes ``start`` to ``end`` merged into one: [N, C, H, W] to [N, C*H*W]."""

    def __init__(self, start: int = 1, end: int = -1) -> None:
        self.start = start
        self.end = end

    def build(self, x: Value) -> Any:
        rank = max(x.ndim, 2)  # of a scalar or a vector, the result is a vector
        for axis in (self.start, self.end):
            if not -rank <= axis < rank:
                raise ShapeError(
                    f"Flatten({self.start}, {self.end}) of an input of rank {x.ndim}: there is no axis {axis}",
                    facts=[f"input {x.type}", f"accepted: {-rank} to {rank - 1}"],
                )
        start, end = self.start % rank, self.end % rank
        if start > end:
            raise ShapeError(
                f"Flatten({self.start}, {self.end}) ends before it starts",
                facts=[f"input {x.type}"],
                hint=f"write Flatten({self.end}, {self.start})",
            )
        if x.ndim < 2:
            return ops.reshape(x, shape=(product(x.shape),))
        return ops.reshape(x, shape=(*x.shape[:start], product(x.shape[start : end + 1]), *x.shape[end + 1 :]))


class Reshape(Layer):
    """The same elements in another shape; ``Reshape(-1, 8)`` preserves the first axis unless ``batch=False``."""

    def __init__(self, *shape: Any, batch: bool = True) -> None:
        self.shape = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (list, tuple)) else shape
        self.batch = batch

    def build(self, x: Value) -> Any:
        return ops.reshape(x, shape=(*x.shape[:1], *self.shape) if self.batch else self.shape)


class Transpose(Layer):
    """Axes in another order; reversed if there are no arguments."""

    def __init__(self, *perm: Any) -> None:
        self.perm = tuple(perm[0]) if len(perm) == 1 and isinstance(perm[0], (list, tuple)) else perm

    def build(self, x: Value) -> Any:
        return ops.transpose(x, perm=self.perm or None)


class Squeeze(Layer):
    """Removes axes of size 1: those of ``axis``, or all."""

    def __init__(self, axis: int | Sequence[int] | None = None) -> None:
        self.axis = axis

    def build(self, x: Value) -> Any:
        return ops.squeeze(x, axis=self.axis)


class Unsqueeze(Layer):
    """Inserts axes of size 1."""

    def __init__(self, axis: int | Sequence[int]) -> None:
        self.axis = (axis,) if isinstance(axis, int) else tuple(axis)

    def build(self, x: Value) -> Any:
        return ops.unsqueeze(x, axis=self.axis)


class _Joining(Layer):
    scalars = False

    def __init__(self, axis: int = -1, n: int = 2) -> None:
        self.axis = axis
        self.inputs = tuple(f"input{k}" for k in range(positive(type(self).__name__, "n", n)))


class Concat(_Joining):
    """``n`` inputs concatenated along an axis: ``Concat(axis=1)(input0="a", input1="b")``.

    With ``axis=None`` the result is a vector of all elements.
    """

    def __init__(self, axis: int | None = -1, n: int = 2) -> None:
        super().__init__(-1 if axis is None else axis, n)
        self.flat = axis is None

    def build(self, *xs: Value) -> Any:
        if self.flat:
            return ops.concat(*(ops.reshape(x, shape=(product(x.shape),)) for x in xs), axis=0)
        return ops.concat(*xs, axis=self.axis)


class Stack(_Joining):
    """``n`` inputs stacked along a new axis."""

    def build(self, *xs: Value) -> Any:
        return ops.stack(*xs, axis=self.axis)


# Each part is an output with a name: a mistyped number would fill the memory before an error could name it.
MAX_PARTS = 1 << 16


class Split(Layer):
    """Segments along an axis: ``Split(3)`` of equal size, ``Split([4, 8])`` of these sizes; outputs output0, ..."""

    def __init__(self, parts: int | Sequence[int], axis: int = -1) -> None:
        self.parts = positive("Split", "parts", parts) if isinstance(parts, int) else tuple(parts)
        self.axis = axis
        count = self.parts if isinstance(self.parts, int) else len(self.parts)
        if count > MAX_PARTS:
            raise ModelError(f"Split: parts={count} is too large", facts=[f"accepted: at most {MAX_PARTS}"])
        self.outputs = tuple(f"output{k}" for k in range(count))

    def build(self, x: Value) -> Any:
        sizes = self.parts
        if isinstance(sizes, int):
            size = x.shape[normalize_axis(self.axis, x.ndim)]
            if is_static((size,)) and int(size) % sizes:
                raise ShapeError(
                    f"cannot split axis {self.axis} of size {size} into {sizes} equal parts", facts=[f"input {x.type}"]
                )
            sizes = (size // sizes,) * sizes  # type: ignore[assignment]
        return ops.split(x, sizes=sizes, axis=self.axis)


class Pad(Layer):
    """Padding of the last axes by pairs (before, after); negative widths remove elements.

    ``mode`` is constant, reflect, symmetric, wrap or edge.
    """

    def __init__(self, *widths: int | Sequence[int], mode: str = "constant", value: float = 0.0) -> None:
        pairs = [(w, w) if isinstance(w, int) else tuple(w) for w in widths]
        if not pairs or any(len(p) != 2 or not all(isinstance(n, int) for n in p) for p in pairs):
            raise ModelError(
                f"Pad: invalid widths {widths!r}", hint="write Pad(1, 1) or Pad((0, 1), (2, 2)), the last axis last"
            )
        self.widths = tuple(pairs)
        self.mode = mode
        self.value = value

    def build(self, x: Value) -> Any:
        if len(self.widths) > x.ndim:
            raise ShapeError(
                f"Pad has {len(self.widths)} pairs for an input of rank {x.ndim}", facts=[f"input {x.type}"]
            )
        unpadded = x.ndim - len(self.widths)
        for axis, (before, after) in enumerate(self.widths, start=unpadded):
            if before < 0 or after < 0:
                start, stop = max(-before, 0), x.shape[axis] - max(-after, 0)
                if at_most(start, stop) is False:
                    raise ShapeError(
                        f"Pad removes more than all {x.shape[axis]} elements of axis {axis}", facts=[f"input {x.type}"]
                    )
                x = ops.slice(x, starts=(start,), stops=(stop,), steps=(1,), axes=(axis,))
        widths = ((0, 0),) * unpadded + tuple((max(a, 0), max(b, 0)) for a, b in self.widths)
        return ops.pad(x, widths=widths, mode=self.mode, value=self.value)


class Upsample(Layer):
    """Resampling of [N, C, H, W]: ``Upsample(scale=2)`` or ``Upsample(size=(64, 64))``.

    ``mode`` is nearest, bilinear or bicubic. With ``antialias`` a smaller result averages over the pixels it covers.
    """

    def __init__(
        self,
        scale: int | None = None,
        *,
        size: Any = None,
        mode: str = "nearest",
        align_corners: bool = False,
        antialias: bool = False,
    ) -> None:
        if (scale is None) == (size is None):
            raise ModelError("Upsample needs either scale or size", hint="write Upsample(scale=2)")
        self.scale = scale
        self.size = (size, size) if isinstance(size, int) else size
        self.mode = mode
        self.align_corners = align_corners
        self.antialias = antialias

    def build(self, x: Value) -> Any:
        size = self.size
        if size is None:
            assert self.scale is not None
            size = tuple(n * self.scale for n in x.shape[2:])
        return ops.resize(
            x, size=tuple(size), mode=self.mode, align_corners=self.align_corners, antialias=self.antialias
        )


class PRelu(Layer):
    """max(x, 0) + slope * min(x, 0) with learned slopes: one, or one per channel."""

    weights = ("weight",)

    def __init__(self, slopes: int = 1, init: float = 0.25) -> None:
        self.slopes = positive("PRelu", "slopes", slopes)
        self.init = init

    def build(self, x: Value) -> Any:
        slope = self.param("weight", (self.slopes,), f"constant(value={self.init})")
        if self.slopes > 1:
            slope = ops.reshape(slope, shape=(self.slopes, *(1,) * (x.ndim - 2)))
        return ops.prelu(x, slope)
