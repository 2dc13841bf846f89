"""Products: ggml for few rows and for packed weights, NumPy's BLAS for the rest."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mithril import ops
from mithril.backend import cached_attention, expert_matmul, expert_weight_grad
from mithril.graph import Node
from mithril_ggml.library.library import ggml
from mithril_ggml.lowering.elementwise import EPILOGUES, activated
from mithril_ggml.lowering.norms import combined
from mithril_ggml.lowering.table import Array, dtype_of, is_filled, is_single, reference_function, row
from mithril_ggml.program.program_builder import ProgramBuilder
from mithril_ggml.program.strided_tensor import Tensor

FEW = 16  # rows up to which ggml's dot products beat a BLAS that packs its operands first
TINY = 1 << 15  # multiplications that cost less than leaving ggml
GREEDY = 1 << 20  # elements of a weight from which one row is bound by memory, where BLAS reads faster


@row("expert_matmul", "expert_weight_grad", when=lambda node: dtype_of(node).name == "float32")
def _expert_products(draft: ProgramBuilder, node: Node, *operands: Tensor) -> Tensor:
    """Multiply the rows of each expert by NumPy."""
    function: Any = expert_matmul if node.op is ops.expert_matmul else expert_weight_grad

    def multiply(*arrays: Array) -> None:
        arrays[-1][...] = function(*arrays[:-1], **node.attributes)

    out = draft.like(node.result)
    draft.numpy(node.op.name, multiply, list(operands), [out])
    return out


@row("attention", when=lambda node: bool(node.tags.get("cached")))
def _cached_attention(draft: ProgramBuilder, node: Node, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attend to a cache by NumPy, which reads only the positions that the mask shows."""
    scale = node.attributes["scale"]
    factor = scale if scale is not None else q.shape[3] ** -0.5

    def attend(q: Array, k: Array, v: Array, mask: Array, out: Array) -> None:
        out[...] = cached_attention(q, k, v, mask, factor)  # type: ignore[no-untyped-call]

    out = draft.like(node.result)
    draft.numpy("cached_attention", attend, [q, k, v, mask], [out])
    return out


@row("matmul", when=is_filled, packed=(1,))
def _matmul(draft: ProgramBuilder, node: Node, a: Tensor, b: Tensor) -> Tensor:
    if not dtype_of(node).is_float or dtype_of(node).bits == 16:
        return reference_function(draft, node, a, b)[0]
    out = draft.like(node.result)
    packed = draft.settings.packed(draft, node, 1)
    if packed is not None:
        return by_rows_of(draft, a, packed, out)
    if is_single(node) and _prefers_ggml(a, b):
        return by_rows_of(draft, a, _flipped(b), out)
    multiply(draft, a, b, out)
    return out


def multiply(draft: ProgramBuilder, a: Tensor, b: Tensor, out: Tensor) -> None:
    """Multiply with NumPy, which passes matrices with unit stride in either axis to BLAS without a copy."""
    draft.numpy("matmul", _product, [_for_blas(draft, a), _for_blas(draft, b)], [out])


def _product(a: Array, b: Array, out: Array) -> None:
    np.matmul(a, b, out=out) if out.ndim else out.__setitem__((), np.matmul(a, b))


def _for_blas(draft: ProgramBuilder, t: Tensor) -> Tensor:
    """Return a matrix with unit stride in one axis; NumPy multiplies others element by element."""
    if t.rank < 2:
        return t
    unit = t.dtype.itemsize
    rows, columns = t.strides[-2:]
    fits = (columns == unit and rows >= unit * t.shape[-1]) or (rows == unit and columns >= unit * t.shape[-2])
    return t if fits else draft.copied(t)


def _prefers_ggml(a: Tensor, b: Tensor) -> bool:
    """Whether ggml's product is faster: one transposed matrix and few rows, or little work in total."""
    if b.rank != 2 or a.rank < 1 or not _flipped(b).dense:
        return False
    rows = a.size // a.shape[-1]
    work = rows * b.size
    return work <= TINY or (rows <= FEW and not (rows == 1 and b.size >= GREEDY))


def _flipped(t: Tensor) -> Tensor:
    return t.transposed((*range(t.rank - 2), t.rank - 1, t.rank - 2))


def by_rows_of(draft: ProgramBuilder, x: Tensor, w: Tensor, out: Tensor) -> Tensor:
    """x times the transpose of w [out, in], by ggml's dot products of rows."""
    k = w.shape[1]
    rows = x.size // k
    flat = draft.shaped(draft.dense(x), (rows, k))
    target = out.reshaped((rows, w.shape[0]))
    assert target is not None
    draft.ggml("mul_mat", lambda ctx, x, w: ggml.ggml_mul_mat(ctx, w, x), [flat, w], target)
    return out


@row("linear", when=lambda node: is_single(node) and node.attributes["activation"] in EPILOGUES, packed=(1,))
def _linear(draft: ProgramBuilder, node: Node, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    shape = tuple(node.result.shape)
    y = draft.new(shape)  # type: ignore[arg-type]
    packed = draft.settings.packed(draft, node, 1)
    rows = x.size // w.shape[1]
    if packed is not None:
        by_rows_of(draft, x, packed, y)
    elif _prefers_ggml(x, _flipped(w)):
        by_rows_of(draft, x, w, y)
    else:
        flat = draft.shaped(x, (rows, w.shape[1]))
        target = y.reshaped((rows, w.shape[0]))
        assert target is not None
        multiply(draft, flat, _flipped(w), target)
    if b is not None:
        y = combined(draft, "add", y, b)
    activation = node.attributes["activation"]
    return y if activation == "none" else activated(draft, activation, y)


@row("dot", when=lambda node: is_filled(node) and dtype_of(node).is_float and dtype_of(node).bits > 16, packed=(0, 1))
def _dot(draft: ProgramBuilder, node: Node, a: Tensor, b: Tensor) -> Tensor:
    """Lower a general product to one batched matrix product."""
    attributes = node.attributes
    contract_a, contract_b, batch_a, batch_b = (
        attributes[n] for n in ("contract_a", "contract_b", "batch_a", "batch_b")
    )
    free_a = tuple(k for k in range(a.rank) if k not in contract_a + batch_a)
    free_b = tuple(k for k in range(b.rank) if k not in contract_b + batch_b)
    batch = tuple(a.shape[k] for k in batch_a)
    m, n = (math.prod(t.shape[k] for k in free) for t, free in ((a, free_a), (b, free_b)))
    inner = math.prod(a.shape[k] for k in contract_a)
    out = draft.like(node.result)
    if (packed := draft.settings.packed(draft, node, 1)) is not None:
        return by_rows_of(draft, draft.shaped(a.transposed(free_a + contract_a), (m, inner)), packed, out)
    if (packed := draft.settings.packed(draft, node, 0)) is not None:
        columns = draft.shaped(b.transposed(free_b + contract_b), (n, inner))
        draft.copy(by_rows_of(draft, columns, packed, draft.new((n, m))).transposed((1, 0)), out)
        return out
    left = draft.shaped(a.transposed(batch_a + free_a + contract_a), (*batch, m, inner))
    right = draft.shaped(b.transposed(batch_b + contract_b + free_b), (*batch, inner, n))
    target = out.reshaped((*batch, m, n))
    assert target is not None
    multiply(draft, left, right, target)
    return out
