"""Element-wise operations: nodes of ggml where that is quick, else NumPy's ufuncs writing into the arena."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from mithril import ops
from mithril.graph import DType, Node, Registry, bfloat16, float16, float32, int32, operation_names, operations
from mithril_ggml.library.library import ggml
from mithril_ggml.lowering.table import Array, dtype_of, is_integer, is_single, reference_function, row
from mithril_ggml.program.program_builder import DIMS, SMALL, ProgramBuilder, copy_by_ggml
from mithril_ggml.program.strided_tensor import Tensor, simplified

# ggml calls the C library element by element for most functions. Above this many elements NumPy's vector code wins,
# although leaving and re-entering ggml costs a microsecond; measured per function.
LIMITS: Registry[int] = Registry(
    "elements that ggml is the quicker for",
    {
        ops.tanh: 160,
        ops.exp: 768,
        ops.log: 768,
        ops.sin: 768,
        ops.cos: 768,
        ops.sqrt: 1024,
        ops.sigmoid: 1024,
        ops.floor: 4096,
        ops.ceil: 4096,
        ops.trunc: 4096,
        ops.gelu: 4096,
        ops.neg: 1 << 14,
        ops.abs: 1 << 14,
    },
)
SCALAR = 2048  # where small loops that NumPy does at once begin to cost
ROW = 64  # shorter rows cost ggml more in loops than in arithmetic, once there are many of them


def _maximum(a: Array, b: Any, out: Array) -> None:
    np.maximum(a, b, out=out)  # this and the next do not take it by position


def _minimum(a: Array, b: Any, out: Array) -> None:
    np.minimum(a, b, out=out)


def _sign(x: Array, out: Array) -> None:
    np.sign(x, out=out)
    np.add(out, 0, out=out)  # +0 of both zeros in every dtype


# The references that are ufuncs, and others for those that NumPy has no ufunc of or whose reference is exacter.
UFUNCS: Registry[Any] = Registry(
    "arithmetic by NumPy",
    {
        **{name: op.reference for name, op in operations().items() if isinstance(op.reference, np.ufunc)},
        ops.maximum: _maximum,
        ops.minimum: _minimum,
        ops.pow: np.power,
        ops.floordiv: np.floor_divide,
        ops.mod: np.mod,
        ops.sign: _sign,
        ops.round: np.rint,
    },
)
# They have meanings of their own there.
NOT_OF_INTEGERS = operation_names(ops.floordiv, ops.mod, ops.pow, ops.floor, ops.ceil, ops.round, ops.trunc)
BINARY: Registry[Callable[..., Any]] = Registry(
    "arithmetic by ggml",
    {ops.add: ggml.ggml_add, ops.sub: ggml.ggml_sub, ops.mul: ggml.ggml_mul, ops.div: ggml.ggml_div},
)
UNARY: Registry[Callable[..., Any]] = Registry(
    "functions of ggml",
    {
        ops.neg: ggml.ggml_neg,
        ops.abs: ggml.ggml_abs,
        ops.exp: ggml.ggml_exp,
        ops.log: ggml.ggml_log,
        ops.sqrt: ggml.ggml_sqrt,
        ops.sin: ggml.ggml_sin,
        ops.cos: ggml.ggml_cos,
        ops.tanh: ggml.ggml_tanh,
        ops.floor: ggml.ggml_floor,
        ops.ceil: ggml.ggml_ceil,
        ops.trunc: ggml.ggml_trunc,
    },
)


def ufunc(draft: ProgramBuilder, node: Node, *operands: Tensor) -> Tensor:
    """Call NumPy's ufunc with the result as ``out=``; a single operand is read in memory order."""
    if len(operands) == 1:
        # A transposed array is one contiguous row in the order of its memory; ufuncs would walk it with
        # strides.
        reordered = operands[0].in_memory_order()
        if reordered is not None:
            source, back = reordered
            target = draft.new(source.shape, node.result.dtype)
            donors = [source] if source.dtype is target.dtype else []
            draft.numpy(node.op.name, UFUNCS[node.op.name], [source], [target], donors)
            return target.transposed(back)
    out = draft.like(node.result)
    donors = [t for t in operands if t.dtype is out.dtype and t.shape == out.shape]
    draft.numpy(node.op.name, UFUNCS[node.op.name], operands, [out], donors)
    return out


def _unary(draft: ProgramBuilder, node: Node, x: Tensor) -> Tensor:
    if node.op.name in UNARY and is_single(node) and x.size <= LIMITS[node.op.name]:
        return pointwise(draft, node.op.name, UNARY[node.op.name], x)
    return ufunc(draft, node, x)


def pointwise(draft: ProgramBuilder, name: str, function: Callable[..., Any], x: Tensor) -> Tensor:
    """Apply a unary ggml function to one row of all elements."""
    reordered = x.in_memory_order()
    source, back = reordered if reordered is not None else (draft.dense(x), tuple(range(x.rank)))
    out = draft.new(source.shape)
    flat, target = source.reshaped((source.size,)), out.reshaped((source.size,))
    assert flat is not None
    assert target is not None
    draft.ggml(name, function, [flat], target, [flat])
    return out.transposed(back)


def _binary(draft: ProgramBuilder, node: Node, a: Tensor, b: Tensor) -> Tensor:
    if is_single(node):
        result = arithmetic(draft, node.op.name, a, b, tuple(node.result.shape))  # type: ignore[arg-type]
        if result is not None:
            return result
    return ufunc(draft, node, a, b)


def arithmetic(draft: ProgramBuilder, name: str, a: Tensor, b: Tensor, shape: tuple[int, ...]) -> Tensor | None:
    """Return a ggml node if one operand has the result's shape and the other broadcasts to it, or None (use NumPy)."""
    scaled = _by_number(draft, name, a, b)
    if scaled is not None:
        return scaled
    a, b = a.expanded(shape).core(), b.expanded(shape).core()
    # ggml repeats its second operand only.
    if a.shape != shape and b.shape == shape and name in ("add", "mul"):
        a, b = b, a
    if a.shape != shape:
        return None
    out = draft.new(shape, a.dtype)
    left, right, target = simplified(a, b, out)
    if left.rank > DIMS or not _has_contiguous_rows(left) or not _has_contiguous_rows(right):
        return None
    inner = right.shape[-1] if right.rank else 1
    row_length = target.shape[-1] if target.rank else 1
    if target.size > SCALAR and (inner != row_length or row_length < ROW):
        return None  # single elements of the second operand, or many short rows
    draft.ggml(name, BINARY[name], [left, right], target, [t for t in (left, right) if t.shape == target.shape])
    return out


def _has_contiguous_rows(t: Tensor) -> bool:
    """Rows without gaps, which is what ggml's loops take."""
    steps = [s for n, s in zip(t.shape, t.strides) if n != 1]
    return all(s > 0 for s in steps) and (not t.rank or t.shape[-1] == 1 or steps[-1] == t.dtype.itemsize)


def _by_number(draft: ProgramBuilder, name: str, a: Tensor, b: Tensor) -> Tensor | None:
    """Return a product or sum with a constant scalar, or None."""
    if a.scalar is not None and a.size == 1 and name in ("add", "mul") and b.scalar is None:
        a, b = b, a
    # x * (1 / c) differs from x / c by rounding, so that divisions stay; ggml scales float32 only.
    if a.dtype is not float32 or b.scalar is None or b.size != 1 or a.rank < b.rank or name == "div" or a.size <= 1:
        return None
    number = float(b.scalar)
    if name == "mul":
        return pointwise(draft, "scale", lambda ctx, x: ggml.ggml_scale(ctx, x, number), a)
    shift = number if name == "add" else -number
    return pointwise(draft, "shift", lambda ctx, x: ggml.ggml_scale_bias(ctx, x, 1.0, shift), a)


def _ggml_condition(name: str) -> Callable[[Node], bool]:
    def when(node: Node) -> bool:
        return not (name in NOT_OF_INTEGERS and is_integer(node))

    return when


for _name in UFUNCS:
    _function = _binary if _name in BINARY else _unary if _name in UNARY else ufunc
    row(_name, when=_ggml_condition(_name))(_function)


@row("floor", "ceil", "round", "trunc")
def _round_floats(draft: ProgramBuilder, node: Node, x: Tensor) -> Tensor:
    """Integers are whole already."""
    return x if is_integer(node) else _unary(draft, node, x)


@row("where")
def _where(draft: ProgramBuilder, node: Node, condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
    out = draft.like(node.result)
    if condition.shape == out.shape and out.dtype.itemsize == 4 and out.size > SCALAR:
        mask = draft.new(out.shape, int32)
        draft.numpy("where", _choose_by_bits, [condition, a, b], [out, mask])
        return out
    donors = [b] if b.shape == out.shape and a.storage is not b.storage else []
    draft.numpy("where", _choose, [condition, a, b], [out], donors)
    return out


def _choose_by_bits(condition: Array, a: Array, b: Array, out: Array, mask: Array) -> None:
    """Select without a branch per element: mispredicted branches are twenty times as slow."""
    bits, other = out.view(np.int32), b.view(np.int32)
    np.copyto(mask, condition.view(np.int8))
    np.negative(mask, mask)
    np.bitwise_xor(a.view(np.int32), other, bits)
    np.bitwise_and(bits, mask, bits)
    np.bitwise_xor(bits, other, bits)


def _choose(condition: Array, a: Array, b: Array, out: Array) -> None:
    if out is not b:
        np.copyto(out, b)
    np.copyto(out, a, where=condition)


@row("cast")
def _cast(draft: ProgramBuilder, node: Node, x: Tensor) -> Tensor:
    """Between floats ggml's or NumPy's own; to integers the declaration."""
    source, target = dtype_of(node), node.result.dtype
    if source is target:
        return x
    if target.is_integer and not source.is_bool:
        return reference_function(draft, node, x)[0]
    out = draft.like(node.result)
    if _is_copied_by_ggml(x, source, target):
        flat, written = x.reshaped((x.size,)), out.reshaped((x.size,))
        assert flat is not None
        assert written is not None
        draft.ggml("cpy", copy_by_ggml, [flat, written], written)
        return out
    draft.numpy("cast", _is_not_zero if target.is_bool else assign, [x], [out])
    return out


def _is_copied_by_ggml(x: Tensor, source: DType, target: DType) -> bool:
    """NumPy takes twice as long for float16, and half as long for many elements of bfloat16."""
    if not x.dense or x.size == 0 or not {source, target} <= {float32, float16, bfloat16}:
        return False
    return float16 in (source, target) or x.size <= SMALL


def assign(x: Array, out: Array) -> None:
    out[...] = x


def _is_not_zero(x: Array, out: Array) -> None:
    np.not_equal(x, 0, out=out)


@row("clip", when=is_single)
def _clip(draft: ProgramBuilder, node: Node, x: Tensor) -> Tensor:
    """ggml's clamp overwrites its operand: NumPy's does not."""
    low, high = node.attributes["low"], node.attributes["high"]
    out = draft.like(node.result)

    def clip(x: Array, out: Array) -> None:
        if low is not None:
            _maximum(x, np.float32(low), out)
            x = out
        if high is not None:
            _minimum(x, np.float32(high), out)
        elif low is None:
            np.copyto(out, x)

    draft.numpy("clip", clip, [x], [out], [x])
    return out


# -- composites that ggml or a few passes of NumPy do at once ---------------------------------------------------------
def _sigmoid(x: Array, out: Array) -> None:
    np.negative(x, out)
    np.exp(out, out)
    np.add(out, 1, out)
    np.reciprocal(out, out)


def _tanh(x: Array, out: Array) -> None:
    np.tanh(x, out)


# By name: ggml's function, and NumPy's for many elements where that is the quicker.
ACTIVATIONS: Registry[tuple[Callable[..., Any], Callable[[Array, Array], None] | None]] = Registry(
    "activations by ggml",
    {
        ops.sigmoid: (ggml.ggml_sigmoid, _sigmoid),
        ops.tanh: (ggml.ggml_tanh, _tanh),
        ops.silu: (ggml.ggml_silu, None),
        ops.gelu: (ggml.ggml_gelu_erf, None),
        ops.square: (ggml.ggml_sqr, None),
    },
)
EPILOGUES = {"none", "relu", "gelu_tanh"} | ACTIVATIONS.keys()  # of products


def activated(draft: ProgramBuilder, name: str, x: Tensor) -> Tensor:
    """Apply an activation with the faster library for this number of elements."""
    if name == "gelu_tanh":
        return _gelu_tanh(draft, x)
    if name == "relu":
        return _relu(draft, x)
    if name == "gelu" and x.size > LIMITS[name]:
        return _gelu_erf(draft, x)
    small, large = ACTIVATIONS[name]
    if large is None or x.size <= LIMITS[name]:
        return pointwise(draft, name, small, x)
    out = draft.new(x.shape)
    draft.numpy(name, large, [x], [out], [x])
    return out


# erf(z) = tanh(z * R(z * z)) with a relative error of 1.1e-7 in single precision: tanh is the quickest function that
# NumPy has, and hides the error of the polynomial at saturation. The first coefficient is the slope at 0; the last one
# is positive, so that the argument grows monotonically.
_R = (1.1283791670955126, 0.10277002168265173, -0.0001939140145701657, -0.0006180950890487224,
      8.704134905898336e-05, -5.577096956601725e-06, 1.369297416323897e-07)  # fmt: skip
BLOCK = 1 << 15  # elements that stay in the first caches from pass to pass


def _erf_of(scale: float) -> Callable[[Array, Array, Array], None]:
    """erf(scale * x) of a block, with room for the square."""
    numbers = [np.array(c * scale ** (2 * k + 1), np.float32) for k, c in enumerate(_R)]

    def erf(x: Array, out: Array, square: Array) -> None:
        np.multiply(x, x, square)
        np.multiply(square, numbers[-1], out)
        for c in numbers[-2:0:-1]:
            np.add(out, c, out)
            np.multiply(out, square, out)
        np.add(out, numbers[0], out)
        np.multiply(out, x, out)
        np.tanh(out, out)

    return erf


def _by_blocks(draft: ProgramBuilder, name: str, x: Tensor, step: Callable[..., None], room: int) -> Tensor:
    """Apply a function of several passes block by block."""
    source = draft.dense(x)
    out = draft.new(source.shape)
    flat, target = source.reshaped((source.size,)), out.reshaped((source.size,))
    assert flat is not None
    assert target is not None
    spare = draft.new((room, min(BLOCK, source.size)))

    def run(x: Array, out: Array, spare: Array) -> None:
        for start in range(0, x.size, BLOCK):
            part = x[start : start + BLOCK]
            step(part, out[start : start + BLOCK], *spare[:, : part.size])

    draft.numpy(name, run, [flat], [target, spare])
    return out


def _gelu_erf(draft: ProgramBuilder, x: Tensor) -> Tensor:
    """ggml calls the C library's erf for each element."""

    erf = _erf_of(1 / math.sqrt(2))

    def gelu(x: Array, out: Array, square: Array) -> None:
        erf(x, out, square)
        np.add(out, 1, out)
        np.multiply(out, np.float32(0.5), out)
        np.multiply(out, x, out)

    return _by_blocks(draft, "gelu", x, gelu, 1)


@row("erf", when=is_single)
def _erf_row(draft: ProgramBuilder, node: Node, x: Tensor) -> Tensor:
    return _by_blocks(draft, "erf", x, _erf_of(1.0), 1)


def _relu(draft: ProgramBuilder, x: Tensor) -> Tensor:
    """ggml's own gives 0 for nan, which only ``semantics="native"`` allows."""
    if draft.settings.native:
        return pointwise(draft, "relu", ggml.ggml_relu, x)
    out = draft.new(x.shape)
    draft.numpy("relu", lambda x, out: np.maximum(x, 0, out=out), [x], [out], [x])
    return out


def _gelu_tanh(draft: ProgramBuilder, x: Tensor) -> Tensor:
    """ggml's own looks it up in a table of 16-bit floats."""
    out, inner = draft.new(x.shape), draft.new(x.shape)

    def gelu(x: Array, out: Array, t: Array) -> None:
        np.multiply(x, x, t)
        np.multiply(t, np.float32(0.044715), t)
        np.add(t, 1, t)
        np.multiply(t, x, t)
        np.multiply(t, np.float32(0.7978845608028654), t)
        np.tanh(t, t)
        np.add(t, 1, t)
        np.multiply(t, np.float32(0.5), t)
        np.multiply(t, x, out)

    draft.numpy("gelu_tanh", gelu, [x], [out, inner])
    return out


@row("sigmoid", "silu", "square", "relu", when=is_single)
def _activation(draft: ProgramBuilder, node: Node, x: Tensor) -> Tensor:
    return activated(draft, node.op.name, x)


@row("gelu", when=is_single)
def _gelu(draft: ProgramBuilder, node: Node, x: Tensor) -> Tensor:
    return activated(draft, "gelu_tanh" if node.attributes["approximate"] == "tanh" else "gelu", x)
