"""ATen operators on elements: arithmetic, comparisons, activations."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mithril import ops
from mithril_importing import special_functions as special
from mithril_importing.arrays import as_value, broadcast
from mithril_torch.importing.table import cast, is_tensor, row, sizes_of

UNARY = (
    *("abs", "acos", "acosh", "asin", "asinh", "atan", "atanh", "ceil", "cos", "cosh", "erf", "erfinv", "exp", "expm1"),
    *("floor", "isnan", "isinf", "isfinite", "log", "log1p", "log2", "neg", "reciprocal", "round", "erfc"),
    *("rsqrt", "sigmoid", "sign", "sin", "sinh", "sqrt", "square", "tan", "tanh", "trunc"),
)
PREDICATES = ("isnan", "isinf", "isfinite")
ACTIVATIONS = {
    "relu": ops.relu,
    "relu6": ops.relu6,
    "selu": ops.selu,
    "silu": ops.silu,
    "mish": ops.mish,
    "hardswish": ops.hard_swish,
    "hardsigmoid": ops.hard_sigmoid,
    "log_sigmoid": ops.log_sigmoid,
}
BINARY = {
    "div.Tensor": ops.div,
    "div.Scalar": ops.div,
    "pow.Tensor_Tensor": ops.pow,
    "pow.Scalar": ops.pow,
    "maximum": ops.maximum,
    "minimum": ops.minimum,
    "atan2": ops.atan2,
    "remainder.Tensor": ops.mod,
    "remainder.Scalar": ops.mod,
    "floor_divide": ops.floordiv,
}
COMPARISONS = {
    "eq": ops.equal,
    "ne": ops.not_equal,
    "lt": ops.less,
    "le": ops.less_equal,
    "gt": ops.greater,
    "ge": ops.greater_equal,
}

for _name in UNARY:
    _op = getattr(ops, _name)
    row(_name, promotes="" if _name in PREDICATES else "result")(lambda x, op=_op: op(x))
for _name, _op in ACTIVATIONS.items():
    row(_name)(lambda x, op=_op: op(x))
for _name, _op in BINARY.items():
    row(_name, promotes="result")(lambda x, y, op=_op: op(x, y))
for _name, _op in COMPARISONS.items():
    row(f"{_name}.Tensor", f"{_name}.Scalar", promotes="operands")(lambda x, y, op=_op: op(x, y))


@row("add.Tensor", "add.Scalar", promotes="result")
def add(x: Any, y: Any, alpha: Any = 1) -> Any:
    return by_dtype(ops.logical_or, ops.add, x, y if alpha == 1 else ops.mul(y, alpha))


@row("mul.Tensor", "mul.Scalar", promotes="result")
def mul(x: Any, y: Any) -> Any:
    return by_dtype(ops.logical_and, ops.mul, x, y)


@row("sub.Tensor", "sub.Scalar", promotes="result")
def sub(x: Any, y: Any, alpha: Any = 1) -> Any:
    return ops.sub(x, y if alpha == 1 else ops.mul(y, alpha))


@row("rsub.Tensor", "rsub.Scalar", promotes="result")
def rsub(x: Any, y: Any, alpha: Any = 1) -> Any:
    return ops.sub(y, x if alpha == 1 else ops.mul(x, alpha))


def by_dtype(for_bools: Any, otherwise: Any, x: Any, y: Any) -> Any:
    """Apply one of two operations, by the dtype of the operands."""
    return (for_bools if str(getattr(x, "dtype", "")) == "bool" else otherwise)(x, y)


for _name in ("and", "or", "xor"):
    _pair = (getattr(ops, f"logical_{_name}"), getattr(ops, f"bitwise_{_name}"))
    row(f"bitwise_{_name}.Tensor", f"bitwise_{_name}.Scalar", promotes="result")(
        lambda x, y, pair=_pair: by_dtype(pair[0], pair[1], x, y)
    )
    row(f"logical_{_name}")(lambda x, y, op=_pair[0]: op(cast(x, "bool"), cast(y, "bool")))


@row("_neg_view")
def neg_view(x: Any) -> Any:
    return ops.neg(x)


@row("bitwise_not")
def bitwise_not(x: Any) -> Any:
    return (ops.logical_not if str(x.dtype) == "bool" else ops.bitwise_not)(x)


@row("pow.Tensor_Scalar", promotes="result")
def power(x: Any, exponent: Any) -> Any:
    if exponent == 2:
        return ops.square(x)
    return ops.sqrt(x) if exponent == 0.5 else ops.pow(x, exponent)


@row("div.Tensor_mode", "div.Scalar_mode", promotes="result")
def divide(x: Any, y: Any, rounding_mode: str | None = None) -> Any:
    if rounding_mode is None:
        return ops.div(x, y)
    if rounding_mode == "floor":
        return ops.floordiv(x, y)
    if "int" in str(x.dtype):
        return ops.sub(x, fmod(x, y)) if y == 1 else ops.floordiv(ops.sub(x, fmod(x, y)), y)
    return ops.trunc(ops.div(x, y))


@row("fmod.Tensor", "fmod.Scalar", promotes="result")
def fmod(x: Any, y: Any) -> Any:
    """Return the remainder with the sign of the dividend."""
    return ops.mul(ops.sign(x), ops.mod(ops.abs(x), abs(y) if isinstance(y, (int, float)) else ops.abs(y)))


@row("where.self")
def where(condition: Any, x: Any, y: Any, like: Any) -> Any:
    return ops.where(condition, cast(x, like.dtype), cast(y, like.dtype))


@row("masked_fill.Scalar", "masked_fill.Tensor")
def masked_fill(x: Any, mask: Any, value: Any, like: Any) -> Any:
    return ops.where(mask, cast(value, like.dtype), x)


@row("clamp", "clamp.Tensor", "clamp_min", "clamp_min.Tensor", promotes="result")
def clamp(x: Any, min: Any = None, max: Any = None) -> Any:
    x = x if min is None else ops.maximum(x, min)
    return x if max is None else ops.minimum(x, max)


@row("clamp_max", "clamp_max.Tensor", promotes="result")
def clamp_max(x: Any, max: Any) -> Any:
    return ops.minimum(x, max)


@row("_to_copy", "to.dtype", "prims::convert_element_type")
def to_dtype(x: Any, dtype: Any = None) -> Any:
    return cast(x, dtype)


@row("logical_not")
def logical_not(x: Any) -> Any:
    return ops.logical_not(cast(x, "bool"))


@row("alias", "clone", "detach", "contiguous", "lift_fresh_copy", "positive", "detach_")
def unchanged(x: Any) -> Any:
    return x


@row("mithril::stop_gradient")
def stop_gradient(x: Any) -> Any:
    return ops.stop_gradient(x)


@row("copy")
def copy(x: Any, source: Any, like: Any) -> Any:
    return broadcast(cast(source, like.dtype), sizes_of(x))


# -- bits and signs -----------------------------------------------------------------------------------------------
for _name, _op in (("left", ops.shift_left), ("right", ops.shift_right)):
    row(
        *(f"bitwise_{_name}_shift.{overload}" for overload in ("Tensor", "Tensor_Scalar", "Scalar_Tensor")),
        *(f"__{_name[0]}shift__.{overload}" for overload in ("Tensor", "Scalar")),
        promotes="result",
    )(lambda x, y, op=_op: op(x, y))


@row("signbit")
def signbit(x: Any) -> Any:
    kind = str(x.dtype)
    if "float" not in kind:
        return ops.less(x, 0) if kind.startswith("int") else ops.full(shape=sizes_of(x), value=False, dtype="bool")
    return ops.less(ops.bitcast(x, dtype=f"int{8 * special.width_of(x)}"), 0)


@row("copysign.Tensor", "copysign.Scalar", promotes="result")
def copysign(x: Any, y: Any) -> Any:
    size = ops.abs(x)
    if not is_tensor(y):
        return ops.neg(size) if math.copysign(1.0, y) < 0 else size
    return ops.where(signbit(y), ops.neg(size), size)


row("nextafter", promotes="result")(special.nextafter)


@row("ldexp.Tensor", promotes="result")
def ldexp(x: Any, y: Any) -> Any:
    return ops.mul(x, ops.pow(2.0, y))


@row("frexp.Tensor")
def frexp(x: Any) -> Any:
    """Return the mantissas, of size 1/2 to 1, and the exponents of two."""
    finite = ops.logical_and(ops.isfinite(x), ops.not_equal(x, 0.0))
    size = ops.where(finite, ops.abs(ops.stop_gradient(x)), 1.0)
    exponent = ops.floor(ops.log2(size)) + 1.0
    exponent = ops.where(ops.greater_equal(size, ops.pow(2.0, exponent)), exponent + 1.0, exponent)  # rounding of log2
    exponent = ops.where(ops.less(size, ops.pow(2.0, exponent - 1.0)), exponent - 1.0, exponent)
    half = ops.pow(2.0, ops.neg(ops.floor(exponent * 0.5)))  # in two steps, which cannot overflow
    rest = ops.pow(2.0, ops.neg(exponent - ops.floor(exponent * 0.5)))
    mantissa = ops.where(finite, ops.mul(ops.mul(x, half), rest), x)
    return mantissa, cast(ops.where(finite, exponent, 0.0), "int32")


@row("gcd", promotes="result")
def gcd(x: Any, y: Any) -> Any:
    shape = tuple(np.broadcast_shapes(sizes_of(x), sizes_of(y)))
    a, b = (as_value(broadcast(ops.abs(v), shape)) for v in (x, y))
    return ops.while_loop(
        lambda pair: ops.any(ops.not_equal(pair[1], 0)),
        lambda pair: (
            ops.where(ops.equal(pair[1], 0), *pair),
            ops.where(ops.equal(pair[1], 0), pair[1], ops.mod(pair[0], one_for_zero(pair[1]))),
        ),
        (a, b),
    )[0]


def one_for_zero(x: Any) -> Any:
    return ops.where(ops.equal(x, 0), 1, x)


@row("lcm", promotes="result")
def lcm(x: Any, y: Any) -> Any:
    return ops.abs(ops.mul(x, ops.floordiv(y, one_for_zero(gcd(x, y)))))


@row("round.decimals", promotes="result")
def round_decimals(x: Any, decimals: int = 0) -> Any:
    if "int" in str(x.dtype):
        return x
    scale = 10.0 ** abs(decimals)
    if decimals < 0:
        return ops.mul(ops.round(ops.div(x, scale)), scale)
    return ops.div(ops.round(ops.mul(x, scale)), scale) if decimals else ops.round(x)


@row("exp2", promotes="result")
def exp2(x: Any) -> Any:
    return ops.pow(2.0, x)


@row("hypot", promotes="result")
def hypot(x: Any, y: Any) -> Any:
    """Return the length of the hypotenuse; squares are of quotients, which cannot overflow."""
    a, b = ops.abs(x), ops.abs(y)
    size = ops.maximum(ops.maximum(a, b), 0.0)
    scale = ops.where(ops.logical_or(ops.equal(size, 0.0), ops.isinf(size)), 1.0, size)
    return ops.mul(scale, ops.sqrt(ops.add(ops.square(ops.div(a, scale)), ops.square(ops.div(b, scale)))))


for _name, _op in (("fmax", ops.maximum), ("fmin", ops.minimum)):
    row(_name, promotes="result")(
        lambda x, y, op=_op: (
            ops.where(ops.isnan(x), y, ops.where(ops.isnan(y), x, op(x, y))) if "float" in str(x.dtype) else op(x, y)
        )
    )


@row("log10", promotes="result")
def log10(x: Any) -> Any:
    return ops.mul(ops.log(x), 1.0 / math.log(10.0))


@row("lerp.Scalar", "lerp.Tensor", promotes="result")
def lerp(x: Any, end: Any, weight: Any) -> Any:
    return ops.add(x, ops.mul(weight, ops.sub(end, x)))


@row("addcmul", promotes="result")
def addcmul(x: Any, y: Any, z: Any, value: Any = 1) -> Any:
    return ops.add(x, ops.mul(ops.mul(y, z), value))


# -- activations with attributes ----------------------------------------------------------------------------------
@row("gelu")
def gelu(x: Any, approximate: str = "none") -> Any:
    return ops.gelu(x, approximate=approximate)


@row("leaky_relu")
def leaky_relu(x: Any, slope: float = 0.01) -> Any:
    return ops.leaky_relu(x, slope=float(slope))


@row("elu")
def elu(x: Any, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Any:
    negative = ops.elu(ops.mul(x, input_scale) if input_scale != 1 else x, alpha=float(alpha))
    if input_scale != 1:
        negative = ops.where(ops.greater(x, 0.0), x, negative)
    return ops.mul(negative, scale) if scale != 1 else negative


@row("hardtanh")
def hardtanh(x: Any, low: float = -1.0, high: float = 1.0) -> Any:
    if (low, high) == (0, 6):
        return ops.relu6(x)
    return ops.hard_tanh(x, low=float(low), high=float(high))


@row("softplus")
def softplus(x: Any, beta: float = 1.0, threshold: float = 20.0) -> Any:
    scaled = x if beta == 1 else ops.mul(x, beta)
    y = ops.softplus(scaled) if beta == 1 else ops.div(ops.softplus(scaled), beta)
    if threshold >= 20:  # beyond it, the softplus is the operand to 1e-9
        return y
    return ops.where(ops.greater(scaled, float(threshold)), x, y)


@row("prelu", "_prelu_kernel")
def prelu(x: Any, weight: Any) -> Any:
    rank, count = len(x.shape), weight.shape[0] if len(weight.shape) == 1 else 1
    if len(weight.shape) == 1 and rank > 1:
        weight = ops.reshape(weight, shape=(1, count, *[1] * (rank - 2)))
    return ops.where(ops.greater(x, 0.0), x, ops.mul(weight, x))


@row("threshold")
def threshold(x: Any, bound: float, value: float) -> Any:
    return ops.where(ops.greater(x, bound), x, float(value))


@row("softshrink")
def softshrink(x: Any, bound: float = 0.5) -> Any:
    return ops.softshrink(x, bound=float(bound))


@row("hardshrink")
def hardshrink(x: Any, bound: float = 0.5) -> Any:
    return ops.where(ops.less_equal(ops.abs(x), bound), 0.0, x)


@row("glu")
def glu(x: Any, dim: int = -1) -> Any:
    return ops.glu(x, axis=dim)


@row("_safe_softmax")
def safe_softmax(x: Any, dim: int, dtype: Any = None, like: Any = None) -> Any:
    """Return the softmax, or zeros for rows of -inf."""
    x = cast(x, like.dtype)
    is_masked = ops.equal(ops.max(x, axis=(dim,), keepdims=True), float("-inf"))
    return ops.where(is_masked, 0.0, ops.softmax(ops.where(is_masked, 0.0, x), axis=dim))


@row("softmax.int", "_softmax")
def softmax(x: Any, dim: int, dtype: Any = None, like: Any = None) -> Any:
    return ops.softmax(cast(x, like.dtype), axis=dim)


@row("log_softmax.int", "_log_softmax")
def log_softmax(x: Any, dim: int, dtype: Any = None, like: Any = None) -> Any:
    return ops.log_softmax(cast(x, like.dtype), axis=dim)


@row("native_dropout", "dropout", "feature_dropout")
def dropout(x: Any, p: float, train: bool = True, like: Any = None, layer: Any = None) -> Any:
    """Set elements to zero in training; ``native_dropout`` also returns the mask, which only its gradient reads."""
    y = ops.dropout(x, layer.key(), p=float(p)) if train and p else x
    return (y, None) if isinstance(like, (tuple, list)) else y
