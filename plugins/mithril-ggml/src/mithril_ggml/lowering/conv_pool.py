"""Convolutions and pooling: windows as columns in the arena, some images after the others, and the BLAS.

ggml's own convolutions multiply with 16-bit kernels or take several times as long.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from mithril.base.dtypes import bool_
from mithril.ir import Node
from mithril_ggml.lowering.table import Array, is_single, row
from mithril_ggml.program.program_builder import Draft, static
from mithril_ggml.program.strided_tensor import Shape, Tensor

Pairs = Sequence[tuple[int, int]]


class Windows:
    """How windows lie on a padded image."""

    def __init__(
        self, image: Shape, kernel: Shape, stride: Shape, padding: Pairs, dilation: Shape | None = None
    ) -> None:
        self.kernel, self.stride = kernel, stride
        self.dilation = dilation or (1,) * len(kernel)
        self.padded = tuple(n + a + b for n, (a, b) in zip(image[2:], padding))
        self.inside = tuple(slice(a, a + n) for n, (a, _) in zip(image[2:], padding))
        self.pads = any(a or b for a, b in padding)
        rows = zip(self.padded, kernel, self.stride, self.dilation)
        self.counts = tuple((n - (k - 1) * d - 1) // s + 1 for n, k, s, d in rows)

    @property
    def plain(self) -> bool:
        """Whether each window is one element, and all are taken."""
        return not self.pads and math.prod(self.kernel) == 1 and math.prod(self.stride) == 1

    def places(self) -> Iterator[tuple[Any, ...]]:
        """For each element of the kernel, the elements of padded images that it meets."""
        for at in np.ndindex(*self.kernel):
            rows = zip(at, self.counts, self.stride, self.dilation)
            yield (..., *(slice(k * d, k * d + (n - 1) * s + 1, s) for k, n, s, d in rows))

    @property
    def within(self) -> tuple[Any, ...]:
        """The images in their padding."""
        return (..., *self.inside)

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
        room[self.within] = images
        return room


def _windows(node: Node, image: Shape, kernel: Shape) -> Windows:
    a = node.attributes
    return Windows(image, kernel, tuple(a["stride"]), a["padding"], tuple(a["dilation"]) if "dilation" in a else None)


CACHE = 1 << 19  # bytes that should stay near the processor between the steps for some images


def _batches(images: int, elements: int) -> list[slice]:
    """As many images at once as the caches hold, at so many elements each."""
    count = max(1, min(images, CACHE // (4 * max(elements, 1))))
    return [slice(k, min(k + count, images)) for k in range(0, images, count)]


def _most(batches: list[slice]) -> int:
    return int(batches[0].stop - batches[0].start)


def _single_group(node: Node) -> bool:
    return is_single(node) and node.attributes["groups"] == 1


@row("conv", when=is_single)
def _conv(draft: Draft, node: Node, x: Tensor, w: Tensor) -> Tensor:
    out, groups = draft.like(node.result), node.attributes["groups"]
    at = _windows(node, x.shape, w.shape[2:])
    if groups == x.shape[1] == w.shape[0] and w.shape[1] == 1:
        return _depthwise(draft, at, x, w, out)
    inner, count = math.prod(w.shape[1:]), math.prod(at.counts)
    images, channels = x.shape[0], x.shape[1]
    kernels = draft.shaped(draft.dense(w), (groups, w.shape[0] // groups, inner))
    result = out.reshaped((images, groups, w.shape[0] // groups, count))
    assert result is not None
    if at.plain:
        met = draft.shaped(x, (images, groups, channels // groups, count))
        draft.numpy("conv", lambda x, w, out: np.matmul(w, x, out=out), [met, kernels], [result])
        return out
    batches = _batches(images, groups * inner * count)
    columns = draft.new((_most(batches), groups, inner, count))
    room = draft.new((_most(batches), channels, *at.padded))

    def conv(x: Array, w: Array, out: Array, columns: Array, room: Array) -> None:
        room[...] = 0
        for some in batches:
            met = columns[: some.stop - some.start]
            np.copyto(met.reshape(-1, channels, *at.kernel, *at.counts), at.view(at.pad(x[some], room)))
            np.matmul(w, met, out=out[some])

    draft.numpy("conv", conv, [x, kernels], [result, columns, room])
    return out


def _depthwise(draft: Draft, at: Windows, x: Tensor, w: Tensor, out: Tensor) -> Tensor:
    """One kernel per channel: as many sums of products as the kernel has elements."""
    channels = x.shape[1]
    taps = draft.shaped(draft.dense(w), (channels, math.prod(at.kernel)))
    batches = _batches(x.shape[0], channels * math.prod(at.padded))
    room, term = draft.new((_most(batches), channels, *at.padded)), draft.new((_most(batches), channels, *at.counts))
    places = list(at.places())
    spread = (slice(None), *[None] * len(at.kernel))

    def conv(x: Array, w: Array, out: Array, room: Array, term: Array) -> None:
        room[...] = 0
        for some in batches:
            padded, result, part = at.pad(x[some], room), out[some], term[: some.stop - some.start]
            for k, place in enumerate(places):
                np.multiply(padded[place], w[:, k][spread], part if k else result)
                if k:
                    np.add(result, part, result)

    draft.numpy("conv", conv, [x, taps], [out, room, term])
    return out


@row("conv_input_grad", when=_single_group)
def _conv_input_grad(draft: Draft, node: Node, g: Tensor, w: Tensor) -> Tensor:
    out = draft.like(node.result)
    at = _windows(node, out.shape, w.shape[2:])
    channels, inner, count = out.shape[1], math.prod(w.shape[1:]), math.prod(at.counts)
    kernels = draft.shaped(draft.dense(w), (w.shape[0], inner)).transposed((1, 0))
    met = draft.shaped(g, (g.shape[0], w.shape[0], count))
    batches = _batches(g.shape[0], inner * count)
    columns, room = draft.new((_most(batches), inner, count)), draft.new((_most(batches), channels, *at.padded))
    places = list(at.places())

    def grad(g: Array, w: Array, out: Array, columns: Array, room: Array) -> None:
        for some in batches:
            met, image = columns[: some.stop - some.start], room[: some.stop - some.start]
            np.matmul(w, g[some], out=met)
            parts = met.reshape(-1, channels, len(places), *at.counts)
            image[...] = 0
            for k, place in enumerate(places):
                image[place] += parts[:, :, k]
            out[some] = image[at.within]

    draft.numpy("conv_input_grad", grad, [met, kernels], [out, columns, room])
    return out


@row("conv_weight_grad", when=_single_group)
def _conv_weight_grad(draft: Draft, node: Node, x: Tensor, g: Tensor) -> Tensor:
    out = draft.like(node.result)
    at = _windows(node, x.shape, out.shape[2:])
    channels, inner, count = x.shape[1], math.prod(out.shape[1:]), math.prod(at.counts)
    met = draft.shaped(g, (g.shape[0], out.shape[0], count))
    result = out.reshaped((out.shape[0], inner))
    assert result is not None
    batches = _batches(x.shape[0], inner * count)
    columns, room = draft.new((_most(batches), inner, count)), draft.new((_most(batches), channels, *at.padded))
    term = draft.new((_most(batches), *result.shape))

    def grad(x: Array, g: Array, out: Array, columns: Array, room: Array, term: Array) -> None:
        room[...] = 0
        out[...] = 0
        for some in batches:
            met, share = columns[: some.stop - some.start], term[: some.stop - some.start]
            np.copyto(met.reshape(-1, channels, *at.kernel, *at.counts), at.view(at.pad(x[some], room)))
            np.matmul(g[some], met.transpose(0, 2, 1), out=share)
            np.add(out, np.add.reduce(share, 0), out)

    draft.numpy("conv_weight_grad", grad, [x, met], [result, columns, room, term])
    return out


# -- pooling ------------------------------------------------------------------------------------------------------
def _pool(draft: Draft, node: Node, x: Tensor, fill: float, join: Callable[..., Any], finish: Any = None) -> Tensor:
    """The elements of all windows joined, one position in the kernel after the other."""
    out = draft.like(node.result)
    at = _windows(node, x.shape, tuple(node.attributes["kernel"]))
    places = list(at.places())
    batches = _batches(x.shape[0], x.shape[1] * math.prod(at.padded))
    room = draft.new((_most(batches), x.shape[1], *at.padded) if at.pads else (1,))

    def pool(x: Array, out: Array, room: Array) -> None:
        room[...] = fill
        for some in batches:
            padded, result = at.pad(x[some], room), out[some]
            np.copyto(result, padded[places[0]])
            for place in places[1:]:
                join(result, padded[place], out=result)
        if finish is not None:
            np.divide(out, finish, out)

    draft.numpy(node.op.name, pool, [x], [out, room])
    return out


@row("max_pool", when=is_single)
def _max_pool(draft: Draft, node: Node, x: Tensor) -> Tensor:
    return _pool(draft, node, x, -math.inf, np.maximum)


@row("avg_pool", when=is_single)
def _avg_pool(draft: Draft, node: Node, x: Tensor) -> Tensor:
    at = _windows(node, x.shape, tuple(node.attributes["kernel"]))
    return _pool(draft, node, x, 0.0, np.add, _shares(node, at))


def _shares(node: Node, at: Windows) -> Any:
    """How many elements each window averages."""
    if node.attributes["count_include_pad"] or not at.pads:
        return np.float32(math.prod(at.kernel))
    room = np.zeros((1, *at.padded), np.float32)
    room[at.within] = 1
    total: Any = sum(room[place] for place in at.places())
    return total


@row("avg_pool_grad", when=is_single)
def _avg_pool_grad(draft: Draft, node: Node, g: Tensor) -> Tensor:
    shape = static(node.result)
    out = draft.like(node.result)
    at = _windows(node, shape, tuple(node.attributes["kernel"]))
    shares, places = _shares(node, at), list(at.places())
    batches = _batches(shape[0], shape[1] * math.prod(at.padded))
    room, term = draft.new((_most(batches), shape[1], *at.padded)), draft.new((_most(batches), shape[1], *at.counts))

    def grad(g: Array, out: Array, room: Array, term: Array) -> None:
        for some in batches:
            image, share = room[: some.stop - some.start], term[: some.stop - some.start]
            np.divide(g[some], shares, share)
            image[...] = 0
            for place in places:
                image[place] += share
            out[some] = image[at.within]

    draft.numpy("avg_pool_grad", grad, [g], [out, room, term])
    return out


@row("max_pool_positions", when=lambda node: node.operands[0] is not None and _has_elements(node))
def _max_pool_positions(draft: Draft, node: Node, x: Tensor) -> Tensor:
    """The first of the largest in each window, counted in its channel; nan is the largest; -1 of padding alone."""
    out = draft.like(node.result)
    at = _windows(node, x.shape, tuple(node.attributes["kernel"]))
    places = list(at.places())
    numbers = np.full((1, *at.padded), -1, np.int32)
    numbers[at.within] = np.arange(math.prod(x.shape[2:]), dtype=np.int32).reshape(x.shape[2:])
    tables = [np.asarray(numbers[place], order="C") for place in places]
    room, best = draft.new((1, x.shape[1], *at.padded) if at.pads else (1,)), draft.new((x.shape[1], *at.counts))

    def find(x: Array, out: Array, room: Array, best: Array) -> None:
        room[...] = -np.inf
        for k, found in enumerate(out):
            (padded,) = at.pad(x[k : k + 1], room)
            best[...] = -np.inf
            found[...] = -1
            for place, number in zip(places, tables):
                part = padded[place]
                better = ((part > best) | ((part != part) & (best == best)) | (found < 0)) & (number >= 0)
                np.copyto(best, part, where=better)
                np.copyto(found, number, where=better)

    draft.numpy("max_pool_positions", find, [x], [out, room, best])
    return out


def _has_elements(node: Node) -> bool:
    x = node.operands[0]
    assert x is not None
    values = (x, node.result)
    return x.dtype.name == "float32" and not any(n == 0 for v in values for n in v.shape)


@row("max_pool_grad", when=is_single)
def _max_pool_grad(draft: Draft, node: Node, g: Tensor, x: Tensor) -> Tensor:
    """Each window's cotangent to the first of its largest elements; nan is the largest, padding is nothing."""
    out = draft.like(node.result)
    at = _windows(node, x.shape, tuple(node.attributes["kernel"]))
    places = list(at.places())
    real = np.zeros((1, *at.padded), np.bool_)
    real[at.within] = True
    masks = [np.asarray(real[place], order="C") if at.pads else None for place in places]
    batches = _batches(x.shape[0], x.shape[1] * math.prod(at.padded))
    most, channels = _most(batches), x.shape[1]
    room, shares = draft.new((most, channels, *at.padded)), draft.new((most, channels, *at.padded))
    best, term = draft.new((most, channels, *at.counts)), draft.new((most, channels, *at.counts))
    hit, left = draft.new(best.shape, bool_), draft.new(best.shape, bool_)

    def grad(g: Array, x: Array, out: Array, room: Array, shares: Array, *rest: Array) -> None:
        room[...] = -np.inf
        for some in batches:
            padded = at.pad(x[some], room)
            image, best, term, hit, left = (a[: some.stop - some.start] for a in (shares, *rest))
            np.copyto(best, padded[places[0]])
            for place in places[1:]:
                np.maximum(best, padded[place], out=best)
            odd, finite = bool(np.isnan(best).any()), bool(np.isfinite(g[some]).all())
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
                    np.multiply(g[some], hit, term)
                else:  # infinity times no hit would be nan
                    term[...] = 0
                    np.copyto(term, g[some], where=hit)
                image[place] += term
            out[some] = image[at.within]

    draft.numpy("max_pool_grad", grad, [g, x], [out, room, shares, best, term, hit, left])
    return out
