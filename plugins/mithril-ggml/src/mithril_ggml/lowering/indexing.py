"""Indexing: indices are made non-negative and clamped before use."""

from __future__ import annotations

import math

import numpy as np

from mithril.graph import InputError, Node, int32
from mithril_ggml.library.library import ggml
from mithril_ggml.lowering.norms import combined
from mithril_ggml.lowering.table import Array, dtype_of, is_filled, reference_function, row
from mithril_ggml.program.program_builder import ProgramBuilder
from mithril_ggml.program.strided_tensor import Tensor


def check(draft: ProgramBuilder, node: Node, indices: Tensor, *sizes: int) -> None:
    """Add a step that raises for indices out of range, with ``checks=True``. Several sizes belong to the last axis."""
    if not draft.settings.checks:
        return
    name, location = node.op.name, str(node.origin)

    def look(indices: Array) -> None:
        columns = [indices] if len(sizes) == 1 else [indices[..., k] for k in range(len(sizes))]
        for column, size in zip(columns, sizes):
            bad = (column >= size) | (column < -size)
            if bad.any():
                position = tuple(int(k) for k in np.argwhere(bad)[0])
                raise InputError(
                    f"index {column[position]} of '{name}' is out of range for {size} elements",
                    facts=[f"at position {list(position)} of the indices", location],
                )

    draft.numpy("check", look, [indices], [])


WIDE = 4  # elements of a row from which rows are added, not elements


def positions(indices: Array, size: int) -> Array:
    """Count negative indices from the end and clamp indices out of range."""
    as_int64 = np.minimum(indices, np.iinfo(np.int64).max).astype(np.int64) if indices.dtype == np.uint64 else indices
    return np.clip(np.where(as_int64 < 0, as_int64.astype(np.int64) + size, as_int64), 0, size - 1)


@row("embedding", when=is_filled, packed=(1,))
def _embedding(draft: ProgramBuilder, node: Node, indices: Tensor, table: Tensor) -> Tensor:
    return _get_rows(draft, node, table, indices, draft.settings.packed(draft, node, 1))


@row("take", when=is_filled, packed=(0,))
def _take(draft: ProgramBuilder, node: Node, x: Tensor, indices: Tensor) -> Tensor:
    return _get_rows(draft, node, x, indices, draft.settings.packed(draft, node, 0))


def _get_rows(draft: ProgramBuilder, node: Node, x: Tensor, indices: Tensor, packed: Tensor | None) -> Tensor:
    axis = node.attributes.get("axis", 0)
    size = x.shape[axis]
    check(draft, node, indices, size)
    out = draft.like(node.result)
    if packed is not None:
        return _rows_of(draft, packed, indices, out)

    def take(x: Array, indices: Array, out: Array) -> None:
        np.take(x, positions(indices, size), axis, out, "clip")

    draft.numpy("take", take, [x, indices], [out])
    return out


def _rows_of(draft: ProgramBuilder, table: Tensor, indices: Tensor, out: Tensor) -> Tensor:
    """Rows of a packed table, by ggml, which ends the process for an index outside: so they are clamped first."""
    row_indices = draft.new((indices.size,), int32)
    size = table.shape[0]

    def clamp(indices: Array, out: Array) -> None:
        out[...] = positions(indices, size).reshape(-1)

    draft.numpy("positions", clamp, [indices], [row_indices])
    target = out.reshaped((indices.size, table.shape[1]))
    assert target is not None
    draft.ggml("get_rows", ggml.ggml_get_rows, [table, row_indices], target)
    return out


@row("scatter_nd_add", when=lambda node: is_filled(node) and dtype_of(node).name == "float32")
def _scatter_add(draft: ProgramBuilder, node: Node, x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """Rows by ggml, elements by NumPy."""
    depth = indices.shape[-1]
    sizes, width = x.shape[:depth], math.prod(x.shape[depth:])
    if not depth:
        return reference_function(draft, node, x, indices, updates)[0]
    check(draft, node, indices, *sizes)
    count = indices.size // depth
    row_indices = draft.new((count,), int32)

    def locate(indices: Array, out: Array) -> None:
        flat = indices.reshape(count, depth)
        row = positions(flat[:, 0], sizes[0])
        for k in range(1, depth):
            row = row * sizes[k] + positions(flat[:, k], sizes[k])
        out[...] = row

    draft.numpy("positions", locate, [indices], [row_indices])
    rows = math.prod(sizes)
    out = draft.like(node.result)
    target = out.reshaped((rows, width))
    assert target is not None
    terms = draft.shaped(draft.dense(updates), (count, width))
    if width >= WIDE:
        draft.ggml("get_rows_back", ggml.ggml_get_rows_back, [terms, row_indices, target], target)
        if x.scalar == 0.0:
            return out
        return combined(draft, "add", out, x)

    def add(x: Array, positions: Array, terms: Array, out: Array) -> None:
        np.copyto(out, x)
        flat = out.reshape(rows, width)
        for k in range(width):
            np.add.at(flat[:, k], positions, terms[:, k])

    draft.numpy("scatter_nd_add", add, [x, row_indices, terms], [out])
    return out


@row("take_along_axis")
def _take_along(draft: ProgramBuilder, node: Node, x: Tensor, indices: Tensor) -> Tensor:
    check(draft, node, indices, x.shape[node.attributes["axis"]])
    return reference_function(draft, node, x, indices)[0]


@row("gather_nd", "scatter_nd")
def _set_rows(draft: ProgramBuilder, node: Node, x: Tensor, indices: Tensor, *updates: Tensor) -> Tensor:
    first = node.attributes.get("batch_dims", 0)
    sizes = x.shape[first : first + indices.shape[-1]]
    if sizes:
        check(draft, node, draft.shaped(indices, (*indices.shape, 1)) if len(sizes) == 1 else indices, *sizes)
    return reference_function(draft, node, x, indices, *updates)[0]


@row("dynamic_update_slice", "dynamic_update_rows", when=is_filled)
def _dynamic_update(draft: ProgramBuilder, node: Node, x: Tensor, update: Tensor, starts: Tensor) -> Tensor:
    """Update slices in place if the operand has no later use, or in the array of a donated state."""
    axis = node.attributes.get("axis")

    def overwrite(update: Array, starts: Array, out: Array) -> None:
        if axis is None:
            out[_window(out.shape, starts, update.shape)] = update
            return
        for target, new, start in zip(out, update, starts, strict=True):
            begin = np.array([start if k == axis - 1 else 0 for k in range(new.ndim)])
            target[_window(target.shape, begin, new.shape)] = new

    if node.result in draft.in_place:
        draft.numpy(node.op.name, overwrite, [update, starts], [x])
        return x
    out = draft.like(node.result)

    def write(x: Array, update: Array, starts: Array, out: Array) -> None:
        if x.__array_interface__["data"] != out.__array_interface__["data"]:
            np.copyto(out, x)
        overwrite(update, starts, out)

    draft.numpy(node.op.name, write, [x, update, starts], [out], [x])
    return out


@row("dynamic_slice", when=is_filled)
def _dynamic_slice(draft: ProgramBuilder, node: Node, x: Tensor, starts: Tensor) -> Tensor:
    out = draft.like(node.result)

    def read(x: Array, starts: Array, out: Array) -> None:
        np.copyto(out, x[_window(x.shape, starts, out.shape)])

    draft.numpy("dynamic_slice", read, [x, starts], [out])
    return out


def _window(shape: tuple[int, ...], starts: Array, sizes: tuple[int, ...]) -> tuple[slice, ...]:
    """Copy a slice at dynamic starts, clamped to be in bounds."""
    begin = [min(max(int(s) + (n if s < 0 else 0), 0), n - z) for s, n, z in zip(starts, shape, sizes)]
    return tuple(slice(b, b + z) for b, z in zip(begin, sizes))
