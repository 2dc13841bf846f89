"""Convolutions and pooling: windows as columns in the arena, some images after the others, and the BLAS.

ggml's own convolutions multiply with 16-bit kernels or take several times as long.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from mithril.graph import Node, bool_
from mithril_ggml.lowering.table import Array, is_single, row
from mithril_ggml.program.program_builder import ProgramBuilder, static
from mithril_ggml.program.strided_tensor import Shape, Tensor

Pairs = Sequence[tuple[int, int]]


class Windows:
    """Geometry of windows on a padded image."""

    def __init__(
        self, image: Shape, kernel: Shape, stride: Shape, padding: Pairs, dilation: Shape | None = None
    ) -> None:
        self.kernel, self.stride = kernel, stride
        self.dilation = dilation or (1,) * len(kernel)
        self.padded = tuple(n + a + b for n, (a, b) in zip(image[2:], padding))
        self.interior = tuple(slice(a, a + n) for n, (a, _) in zip(image[2:], padding))
        self.pads = any(a or b for a, b in padding)
        rows = zip(self.padded, kernel, self.stride, self.dilation)
        self.counts = tuple((n - (k - 1) * d - 1) // s + 1 for n, k, s, d in rows)

    @property
    def is_identity(self) -> bool:
        """Whether each window is one element, and all are taken."""
        return not self.pads and math.prod(self.kernel) == 1 and math.prod(self.stride) == 1

    def taps(self) -> Iterator[tuple[Any, ...]]:
        """Yield, for each element of the kernel, the slices of padded images that it is multiplied with."""
        for offsets in np.ndindex(*self.kernel):
            rows = zip(offsets, self.counts, self.stride, self.dilation)
            yield (..., *(slice(k * d, k * d + (n - 1) * s + 1, s) for k, n, s, d in rows))

    @property
    def padded_images(self) -> tuple[Any, ...]:
        """The images in their padding."""
        return (..., *self.interior)

    def view(self, padded: Array) -> Array:
        """[images, channels, *kernel, *windows] of padded images, without moving anything."""
        steps = padded.strides[2:]
        inner = tuple(t * d for t, d in zip(steps, self.dilation))
        outer = tuple(t * s for t, s in zip(steps, self.stride))
        shape = (*padded.shape[:2], *self.kernel, *self.counts)
        return np.lib.stride_tricks.as_strided(padded, shape, (*padded.strides[:2], *inner, *outer), writeable=False)

    def pad(self, images: Array, room: Array) -> Array:
        """Images in their padding; the padding itself was filled before."""
        if not self.pads:
            return images
        room = room[: len(images)]
        room[self.padded_images] = images
        return room


def _windows(node: Node, image: Shape, kernel: Shape) -> Windows:
    a = node.attributes
    return Windows(image, kernel, tuple(a["stride"]), a["padding"], tuple(a["dilation"]) if "dilation" in a else None)


CACHE = 1 << 19  # bytes that should stay near the processor between the steps for some images


def _batches(images: int, elements: int) -> list[slice]:
    """Split images into batches whose elements fit into the cache."""
    count = max(1, min(images, CACHE // (4 * max(elements, 1))))
    return [slice(k, min(k + count, images)) for k in range(0, images, count)]


def _batch_length(batches: list[slice]) -> int:
    return int(batches[0].stop - batches[0].start)


def _single_group(node: Node) -> bool:
    return is_single(node) and node.attributes["groups"] == 1


@row("conv", when=is_single)
def _conv(draft: ProgramBuilder, node: Node, x: Tensor, w: Tensor) -> Tensor:
    out, groups = draft.new(static(node.result)), node.attributes["groups"]
    windows = _windows(node, x.shape, w.shape[2:])
    if groups == x.shape[1] == w.shape[0] and w.shape[1] == 1:
        return _depthwise(draft, windows, x, w, out)
    inner, count = math.prod(w.shape[1:]), math.prod(windows.counts)
    images, channels = x.shape[0], x.shape[1]
    kernels = draft.shaped(draft.dense(w), (groups, w.shape[0] // groups, inner))
    result = out.reshaped((images, groups, w.shape[0] // groups, count))
    assert result is not None
    if windows.is_identity:
        operand = draft.shaped(x, (images, groups, channels // groups, count))
        draft.numpy("conv", lambda x, w, out: np.matmul(w, x, out=out), [operand, kernels], [result])
        return out
    batches = _batches(images, groups * inner * count)
    columns = draft.new((_batch_length(batches), groups, inner, count))
    room = draft.new((_batch_length(batches), channels, *windows.padded))

    def conv(x: Array, w: Array, out: Array, columns: Array, room: Array) -> None:
        room[...] = 0
        for batch in batches:
            chunk = columns[: batch.stop - batch.start]
            np.copyto(
                chunk.reshape(-1, channels, *windows.kernel, *windows.counts), windows.view(windows.pad(x[batch], room))
            )
            np.matmul(w, chunk, out=out[batch])

    draft.numpy("conv", conv, [x, kernels], [result, columns, room])
    return out


def _depthwise(draft: ProgramBuilder, windows: Windows, x: Tensor, w: Tensor, out: Tensor) -> Tensor:
    """Lower a depthwise convolution: one multiply-add per element of the kernel."""
    channels = x.shape[1]
    taps = draft.shaped(draft.dense(w), (channels, math.prod(windows.kernel)))
    batches = _batches(x.shape[0], channels * math.prod(windows.padded))
    room, term = (
        draft.new((_batch_length(batches), channels, *windows.padded)),
        draft.new((_batch_length(batches), channels, *windows.counts)),
    )
    places = list(windows.taps())
    spread = (slice(None), *[None] * len(windows.kernel))

    def conv(x: Array, w: Array, out: Array, room: Array, term: Array) -> None:
        room[...] = 0
        for batch in batches:
            padded, result, part = windows.pad(x[batch], room), out[batch], term[: batch.stop - batch.start]
            for k, place in enumerate(places):
                np.multiply(padded[place], w[:, k][spread], part if k else result)
                if k:
                    np.add(result, part, result)

    draft.numpy("conv", conv, [x, taps], [out, room, term])
    return out


@row("conv_input_grad", when=_single_group)
def _conv_input_grad(draft: ProgramBuilder, node: Node, g: Tensor, w: Tensor) -> Tensor:
    out = draft.like(node.result)
    windows = _windows(node, out.shape, w.shape[2:])
    channels, inner, count = out.shape[1], math.prod(w.shape[1:]), math.prod(windows.counts)
    kernels = draft.shaped(draft.dense(w), (w.shape[0], inner)).transposed((1, 0))
    operand = draft.shaped(g, (g.shape[0], w.shape[0], count))
    batches = _batches(g.shape[0], inner * count)
    columns, room = (
        draft.new((_batch_length(batches), inner, count)),
        draft.new((_batch_length(batches), channels, *windows.padded)),
    )
    places = list(windows.taps())

    def grad(g: Array, w: Array, out: Array, columns: Array, room: Array) -> None:
        for batch in batches:
            chunk, image = columns[: batch.stop - batch.start], room[: batch.stop - batch.start]
            np.matmul(w, g[batch], out=chunk)
            parts = chunk.reshape(-1, channels, len(places), *windows.counts)
            image[...] = 0
            for k, place in enumerate(places):
                image[place] += parts[:, :, k]
            out[batch] = image[windows.padded_images]

    draft.numpy("conv_input_grad", grad, [operand, kernels], [out, columns, room])
    return out


@row("conv_weight_grad", when=_single_group)
def _conv_weight_grad(draft: ProgramBuilder, node: Node, x: Tensor, g: Tensor) -> Tensor:
    out = draft.like(node.result)
    windows = _windows(node, x.shape, out.shape[2:])
    channels, inner, count = x.shape[1], math.prod(out.shape[1:]), math.prod(windows.counts)
    operand = draft.shaped(g, (g.shape[0], out.shape[0], count))
    result = out.reshaped((out.shape[0], inner))
    assert result is not None
    batches = _batches(x.shape[0], inner * count)
    columns, room = (
        draft.new((_batch_length(batches), inner, count)),
        draft.new((_batch_length(batches), channels, *windows.padded)),
    )
    term = draft.new((_batch_length(batches), *result.shape))

    def grad(x: Array, g: Array, out: Array, columns: Array, room: Array, term: Array) -> None:
        room[...] = 0
        out[...] = 0
        for batch in batches:
            chunk, share = columns[: batch.stop - batch.start], term[: batch.stop - batch.start]
            np.copyto(
                chunk.reshape(-1, channels, *windows.kernel, *windows.counts), windows.view(windows.pad(x[batch], room))
            )
            np.matmul(g[batch], chunk.transpose(0, 2, 1), out=share)
            np.add(out, np.add.reduce(share, 0), out)

    draft.numpy("conv_weight_grad", grad, [x, operand], [result, columns, room, term])
    return out


# -- pooling ------------------------------------------------------------------------------------------------------
def _pool(
    draft: ProgramBuilder, node: Node, x: Tensor, fill: float, join: Callable[..., Any], finish: Any = None
) -> Tensor:
    """Reduce all windows, one kernel position at a time."""
    out = draft.like(node.result)
    windows = _windows(node, x.shape, tuple(node.attributes["kernel"]))
    places = list(windows.taps())
    batches = _batches(x.shape[0], x.shape[1] * math.prod(windows.padded))
    room = draft.new((_batch_length(batches), x.shape[1], *windows.padded) if windows.pads else (1,))

    def pool(x: Array, out: Array, room: Array) -> None:
        room[...] = fill
        for batch in batches:
            padded, result = windows.pad(x[batch], room), out[batch]
            np.copyto(result, padded[places[0]])
            for place in places[1:]:
                join(result, padded[place], out=result)
        if finish is not None:
            np.divide(out, finish, out)

    draft.numpy(node.op.name, pool, [x], [out, room])
    return out


@row("max_pool", when=is_single)
def _max_pool(draft: ProgramBuilder, node: Node, x: Tensor) -> Tensor:
    return _pool(draft, node, x, -math.inf, np.maximum)


@row("avg_pool", when=is_single)
def _avg_pool(draft: ProgramBuilder, node: Node, x: Tensor) -> Tensor:
    windows = _windows(node, x.shape, tuple(node.attributes["kernel"]))
    return _pool(draft, node, x, 0.0, np.add, _window_counts(node, windows))


def _window_counts(node: Node, windows: Windows) -> Any:
    """Return the number of elements that each window averages."""
    if node.attributes["count_include_pad"] or not windows.pads:
        return np.float32(math.prod(windows.kernel))
    room = np.zeros((1, *windows.padded), np.float32)
    room[windows.padded_images] = 1
    total: Any = sum(room[place] for place in windows.taps())
    return total


@row("avg_pool_grad", when=is_single)
def _avg_pool_grad(draft: ProgramBuilder, node: Node, g: Tensor) -> Tensor:
    shape = static(node.result)
    out = draft.like(node.result)
    windows = _windows(node, shape, tuple(node.attributes["kernel"]))
    shares, places = _window_counts(node, windows), list(windows.taps())
    batches = _batches(shape[0], shape[1] * math.prod(windows.padded))
    room, term = (
        draft.new((_batch_length(batches), shape[1], *windows.padded)),
        draft.new((_batch_length(batches), shape[1], *windows.counts)),
    )

    def grad(g: Array, out: Array, room: Array, term: Array) -> None:
        for batch in batches:
            image, share = room[: batch.stop - batch.start], term[: batch.stop - batch.start]
            np.divide(g[batch], shares, share)
            image[...] = 0
            for place in places:
                image[place] += share
            out[batch] = image[windows.padded_images]

    draft.numpy("avg_pool_grad", grad, [g], [out, room, term])
    return out


@row("max_pool_positions", when=lambda node: node.operands[0] is not None and _has_elements(node))
def _max_pool_positions(draft: ProgramBuilder, node: Node, x: Tensor) -> Tensor:
    """Return the index in its channel of each window's first maximum; nan is largest; -1 if all is padding."""
    out = draft.like(node.result)
    windows = _windows(node, x.shape, tuple(node.attributes["kernel"]))
    places = list(windows.taps())
    numbers = np.full((1, *windows.padded), -1, np.int32)
    numbers[windows.padded_images] = np.arange(math.prod(x.shape[2:]), dtype=np.int32).reshape(x.shape[2:])
    tables = [np.asarray(numbers[place], order="C") for place in places]
    room, best = (
        draft.new((1, x.shape[1], *windows.padded) if windows.pads else (1,)),
        draft.new((x.shape[1], *windows.counts)),
    )

    def find(x: Array, out: Array, room: Array, best: Array) -> None:
        room[...] = -np.inf
        for k, position in enumerate(out):
            (padded,) = windows.pad(x[k : k + 1], room)
            best[...] = -np.inf
            position[...] = -1
            for place, number in zip(places, tables):
                part = padded[place]
                better = ((part > best) | ((part != part) & (best == best)) | (position < 0)) & (number >= 0)
                np.copyto(best, part, where=better)
                np.copyto(position, number, where=better)

    draft.numpy("max_pool_positions", find, [x], [out, room, best])
    return out


def _has_elements(node: Node) -> bool:
    x = node.operands[0]
    assert x is not None
    values = (x, node.result)
    return x.dtype.name == "float32" and not any(n == 0 for v in values for n in v.shape)


@row("max_pool_grad", when=is_single)
def _max_pool_grad(draft: ProgramBuilder, node: Node, g: Tensor, x: Tensor) -> Tensor:
    """Add each window's cotangent to its first maximum; nan is largest, padding is ignored."""
    out = draft.like(node.result)
    windows = _windows(node, x.shape, tuple(node.attributes["kernel"]))
    places = list(windows.taps())
    real = np.zeros((1, *windows.padded), np.bool_)
    real[windows.padded_images] = True
    masks = [np.asarray(real[place], order="C") if windows.pads else None for place in places]
    batches = _batches(x.shape[0], x.shape[1] * math.prod(windows.padded))
    largest_batch, channels = _batch_length(batches), x.shape[1]
    room, shares = (
        draft.new((largest_batch, channels, *windows.padded)),
        draft.new((largest_batch, channels, *windows.padded)),
    )
    best, term = (
        draft.new((largest_batch, channels, *windows.counts)),
        draft.new((largest_batch, channels, *windows.counts)),
    )
    hit, left = draft.new(best.shape, bool_), draft.new(best.shape, bool_)

    def grad(g: Array, x: Array, out: Array, room: Array, shares: Array, *rest: Array) -> None:
        room[...] = -np.inf
        for batch in batches:
            padded = windows.pad(x[batch], room)
            image, best, term, hit, left = (a[: batch.stop - batch.start] for a in (shares, *rest))
            np.copyto(best, padded[places[0]])
            for place in places[1:]:
                np.maximum(best, padded[place], out=best)
            odd, finite = bool(np.isnan(best).any()), bool(np.isfinite(g[batch]).all())
            left[...] = True
            image[...] = 0
            for place, mask in zip(places, masks):
                part = padded[place]
                np.equal(part, best, hit)
                if odd:
                    hit |= np.isnan(part)
                if mask is not None:
                    hit &= mask
                hit &= left
                left ^= hit
                if finite:
                    np.multiply(g[batch], hit, term)
                else:  # infinity times no hit would be nan
                    term[...] = 0
                    np.copyto(term, g[batch], where=hit)
                image[place] += term
            out[batch] = image[windows.padded_images]

    draft.numpy("max_pool_grad", grad, [g, x], [out, room, shares, best, term, hit, left])
    return out
