"""Operations of ``keras.ops`` within functional models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np

from mithril import ops
from mithril.graph import Builder
from mithril_keras.layers.activations import FUNCTIONS
from mithril_keras.table import operation
from mithril_keras.tensor import Tensor, elementwise
from mithril_keras.weights import Weights


def _operand(x: Any, operand: Any) -> Any:
    """Return a value; numbers and arrays take the dtype of the other operand."""
    if isinstance(x, Tensor):
        return x.value
    if isinstance(x, (int, float, bool)):
        return x
    array = np.asarray(x)
    return array.astype(operand.dtype.numpy) if operand is not None and operand.dtype.is_float else array


def _binary(function: Callable[..., Any]) -> Callable[..., Tensor]:
    def apply(weights: Weights, x1: Any, x2: Any) -> Tensor:
        del weights
        if isinstance(x1, Tensor) and isinstance(x2, Tensor):
            return elementwise(function, x1, x2)
        if isinstance(x1, Tensor) and isinstance(x2, (int, float)):
            return elementwise(lambda v: function(v, x2), x1)
        if isinstance(x2, Tensor) and isinstance(x1, (int, float)):
            return elementwise(lambda v: function(x1, v), x2)
        operand = next(t.value for t in (x1, x2) if isinstance(t, Tensor))
        return Tensor(function(_operand(x1, operand), _operand(x2, operand)))

    return apply


BINARY: tuple[tuple[tuple[str, ...], Callable[..., Any]], ...] = (
    (("Add",), ops.add),
    (("Subtract",), ops.sub),
    (("Multiply",), ops.mul),
    (("Divide", "TrueDivide"), ops.div),
    (("FloorDivide",), ops.floordiv),
    (("Mod", "Remainder"), ops.mod),
    (("Power",), ops.pow),
    (("Maximum",), ops.maximum),
    (("Minimum",), ops.minimum),
    (("Equal",), ops.equal),
    (("NotEqual",), ops.not_equal),
    (("Greater",), ops.greater),
    (("GreaterEqual",), ops.greater_equal),
    (("Less",), ops.less),
    (("LessEqual",), ops.less_equal),
    (("LogicalAnd",), ops.logical_and),
    (("LogicalOr",), ops.logical_or),
    (("Arctan2",), ops.atan2),
)
for _names, _function in BINARY:
    operation(*_names)(_binary(_function))


def _unary(function: Callable[..., Any]) -> Callable[..., Tensor]:
    def apply(weights: Weights, x: Tensor) -> Tensor:
        del weights
        return elementwise(function, x)

    return apply


UNARY: dict[str, Callable[..., Any]] = {
    "Absolute": ops.abs,
    "Abs": ops.abs,
    "Negative": ops.neg,
    "Exp": ops.exp,
    "Expm1": ops.expm1,
    "Log": ops.log,
    "Log1p": ops.log1p,
    "Log2": ops.log2,
    "Sqrt": ops.sqrt,
    "Rsqrt": ops.rsqrt,
    "Square": ops.square,
    "Reciprocal": ops.reciprocal,
    "Sin": ops.sin,
    "Cos": ops.cos,
    "Tan": ops.tan,
    "Sinh": ops.sinh,
    "Cosh": ops.cosh,
    "Arcsin": ops.asin,
    "Arccos": ops.acos,
    "Arctan": ops.atan,
    "Erf": ops.erf,
    "Floor": ops.floor,
    "Ceil": ops.ceil,
    "Round": ops.round,
    "Sign": ops.sign,
    "LogicalNot": ops.logical_not,
    "StopGradient": ops.stop_gradient,
    "Relu": FUNCTIONS["relu"],
    "Relu6": FUNCTIONS["relu6"],
    "Sigmoid": FUNCTIONS["sigmoid"],
    "Silu": FUNCTIONS["silu"],
    "Softplus": FUNCTIONS["softplus"],
    "Softsign": FUNCTIONS["softsign"],
    "Tanh": FUNCTIONS["tanh"],
    "HardSigmoid": FUNCTIONS["hard_sigmoid"],
    "HardSilu": FUNCTIONS["hard_silu"],
    "LogSigmoid": FUNCTIONS["log_sigmoid"],
    "Mish": FUNCTIONS["mish"],
    "Selu": FUNCTIONS["selu"],
}
for _name, _function in UNARY.items():
    operation(_name)(_unary(_function))


@operation("Gelu")
def gelu(weights: Weights, x: Tensor, approximate: bool = True) -> Tensor:
    """GELU, exact or by tanh."""
    del weights
    return elementwise(lambda v: ops.gelu(v, approximate="tanh" if approximate else "none"), x)


@operation("LeakyRelu")
def leaky_relu(weights: Weights, x: Tensor, negative_slope: float = 0.2) -> Tensor:
    """Return a slope below zero."""
    del weights
    return elementwise(lambda v: ops.leaky_relu(v, slope=negative_slope), x)


@operation("Elu")
def elu(weights: Weights, x: Tensor, alpha: float = 1.0) -> Tensor:
    """Return an exponential below zero."""
    del weights
    return elementwise(lambda v: ops.elu(v, alpha=alpha), x)


@operation("Softmax")
def softmax(weights: Weights, x: Tensor, axis: int = -1) -> Tensor:
    """Return softmax over an axis."""
    del weights
    return Tensor(ops.softmax(x.value, axis=axis))


@operation("LogSoftmax")
def log_softmax(weights: Weights, x: Tensor, axis: int = -1) -> Tensor:
    """Return the logarithm of softmax over an axis."""
    del weights
    return Tensor(ops.log_softmax(x.value, axis=axis))


@operation("Clip")
def clip(weights: Weights, x: Tensor, x_min: float, x_max: float) -> Tensor:
    """Return bounds of all elements."""
    del weights
    return elementwise(lambda v: ops.minimum(ops.maximum(v, x_min), x_max), x)


@operation("Matmul", "Dot")
def matmul(weights: Weights, x1: Any, x2: Any) -> Tensor:
    """Return a product of matrices."""
    operand = (x1 if isinstance(x1, Tensor) else x2).value
    return Tensor(ops.matmul(_operand(x1, operand), _operand(x2, operand)))


@operation("Einsum")
def einsum(weights: Weights, *operands: Any, subscripts: str) -> Tensor:
    """Return a product by an equation."""
    return Tensor(ops.einsum(*(_operand(x, None) for x in operands), equation=subscripts.replace(" ", "")))


def _reduction(function: Callable[..., Any]) -> Callable[..., Tensor]:
    def apply(weights: Weights, x: Tensor, axis: Any = None, keepdims: bool = False) -> Tensor:
        axes = tuple(axis) if isinstance(axis, Sequence) else axis
        return Tensor(function(x.value, axis=axes, keepdims=keepdims))

    return apply


REDUCTIONS: dict[str, Callable[..., Any]] = {
    "Sum": ops.sum,
    "Mean": ops.mean,
    "Max": ops.max,
    "Amax": ops.max,
    "Min": ops.min,
    "Amin": ops.min,
    "Prod": ops.prod,
    "Var": ops.var,
    "All": ops.all,
    "Any": ops.any,
    "Logsumexp": ops.logsumexp,
}
for _name, _function in REDUCTIONS.items():
    operation(_name)(_reduction(_function))


@operation("Std")
def std(weights: Weights, x: Tensor, axis: Any = None, keepdims: bool = False) -> Tensor:
    """Return the standard deviation over axes."""
    axes = tuple(axis) if isinstance(axis, Sequence) else axis
    return Tensor(ops.sqrt(ops.var(x.value, axis=axes, keepdims=keepdims)))


@operation("Argmax", "Argmin")
def argmax(weights: Weights, x: Tensor, axis: int | None = None, keepdims: bool = False) -> Tensor:
    """Return the place of the maximum over an axis."""
    if axis is None:
        raise weights.unsupported("argmax of all axes")
    return Tensor(ops.argmax(x.value, axis=axis, keepdims=keepdims))


@operation("Reshape")
def reshape(weights: Weights, x: Tensor, newshape: Any) -> Tensor:
    """Return another shape, with the batch; one size can be -1."""
    sizes: list[Any] = [-1 if n is None else n for n in ([newshape] if isinstance(newshape, int) else newshape)]
    if sizes.count(-1) > 1:
        raise weights.unsupported(f"newshape={list(sizes)}")
    if -1 in sizes:
        sizes[sizes.index(-1)] = prod(x.shape) // prod(n for n in sizes if n != -1)
    return Tensor(ops.reshape(x.value, shape=tuple(sizes)))


@operation("Transpose")
def transpose(weights: Weights, x: Tensor, axes: Sequence[int] | None = None) -> Tensor:
    """Return another order of the axes."""
    order = tuple(range(x.rank))[::-1] if axes is None else tuple(a % x.rank for a in axes)
    return Tensor(ops.transpose(x.value, perm=order))


@operation("Swapaxes")
def swapaxes(weights: Weights, x: Tensor, axis1: int, axis2: int) -> Tensor:
    """Return two axes exchanged."""
    order = list(range(x.rank))
    order[axis1], order[axis2] = order[axis2], order[axis1]
    return Tensor(ops.transpose(x.value, perm=tuple(order)))


@operation("ExpandDims")
def expand_dims(weights: Weights, x: Tensor, axis: int | Sequence[int]) -> Tensor:
    """Return new axes of size 1."""
    return Tensor(ops.unsqueeze(x.value, axis=axis if isinstance(axis, int) else tuple(axis)))


@operation("Squeeze")
def squeeze(weights: Weights, x: Tensor, axis: int | Sequence[int] | None = None) -> Tensor:
    """Return fewer axes of size 1."""
    axes = tuple(k for k, n in enumerate(x.shape) if n == 1) if axis is None else axis
    return Tensor(ops.squeeze(x.value, axis=axes if isinstance(axes, int) else tuple(axes)))


@operation("Concatenate")
def concatenate(weights: Weights, xs: Sequence[Any], axis: int = -1) -> Tensor:
    """Return tensors side by side."""
    return Tensor(ops.concat(*(_operand(x, None) for x in xs), axis=axis))


@operation("Stack")
def stack(weights: Weights, x: Sequence[Any], axis: int = 0) -> Tensor:
    """Return tensors along a new axis."""
    return Tensor(ops.stack(*(_operand(v, None) for v in x), axis=axis))


@operation("Split")
def split(weights: Weights, x: Tensor, indices_or_sections: Any, axis: int = 0) -> list[Tensor]:
    """Return equal parts, or parts between positions."""
    n = x.shape[axis]
    if isinstance(indices_or_sections, int):
        sizes = (n // indices_or_sections,) * indices_or_sections
    else:
        places = [0, *indices_or_sections, n]
        sizes = tuple(b - a for a, b in pairwise(places))
    return [Tensor(v) for v in ops.split(x.value, sizes=sizes, axis=axis)]


@operation("GetItem")
def get_item(weights: Weights, x: Tensor, key: Any) -> Tensor:
    """Return an element, a slice, or several."""
    index = tuple(key) if isinstance(key, (list, tuple)) else (key,)
    for part in index:
        if not (part is None or part is ... or isinstance(part, (int, slice))):
            raise weights.unsupported(f"an index {str(part)[:40]}")
    return Tensor(x.value[index])


@operation("Cast")
def cast(weights: Weights, x: Tensor, dtype: str) -> Tensor:
    """Return another dtype."""
    return elementwise(lambda v: ops.cast(v, dtype=dtype), x)


@operation("Where")
def where(weights: Weights, condition: Tensor, x1: Any, x2: Any) -> Tensor:
    """Return elements of one of two tensors."""
    operand = next((t.value for t in (x1, x2) if isinstance(t, Tensor)), None)
    return Tensor(ops.where(condition.value, _operand(x1, operand), _operand(x2, operand)))


@operation("Take")
def take(weights: Weights, x: Any, indices: Any, axis: int | None = None) -> Tensor:
    """Return rows by index."""
    if axis is None:
        raise weights.unsupported("take without an axis")
    places = indices.value if isinstance(indices, Tensor) else np.asarray(indices, np.int32)
    return Tensor(ops.take(_operand(x, None), places, axis=axis))


@operation("BroadcastTo")
def broadcast_to(weights: Weights, x: Tensor, shape: Sequence[int]) -> Tensor:
    """Return axes of size 1 repeated."""
    return Tensor(ops.broadcast_to(x.value, shape=tuple(shape)))


@operation("Pad")
def pad(weights: Weights, x: Tensor, pad_width: Any, mode: str = "constant", constant_values: Any = None) -> Tensor:
    """Return elements around a tensor."""
    if mode != "constant":
        raise weights.unsupported(f"mode='{mode}'")
    widths = tuple((int(a), int(b)) for a, b in pad_width)
    return Tensor(ops.pad(x.value, widths=widths, value=constant_values or 0))


@operation("Identity", "ConvertToTensor")
def identity(weights: Weights, x: Any, dtype: str | None = None, sparse: Any = None, ragged: Any = None) -> Tensor:
    """Return the input, in a dtype."""
    t = x if isinstance(x, Tensor) else Tensor(Builder.current().constant(np.asarray(x)))
    return t if dtype is None else Tensor(ops.cast(t.value, dtype=dtype))


@operation("ZerosLike")
def zeros_like(weights: Weights, x: Tensor, dtype: str | None = None) -> Tensor:
    """Return zeros in the shape of a tensor."""
    return Tensor(ops.full(shape=x.shape, value=0, dtype=dtype or x.dtype))


@operation("OnesLike")
def ones_like(weights: Weights, x: Tensor, dtype: str | None = None) -> Tensor:
    """Return ones in the shape of a tensor."""
    return Tensor(ops.full(shape=x.shape, value=1, dtype=dtype or x.dtype))
