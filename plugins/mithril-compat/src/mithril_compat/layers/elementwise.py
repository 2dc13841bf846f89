"""Layers of single operations on elements, shapes and Python values: arithmetic, comparisons, indexing."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from mithril import ModelError, Value, dtype as as_dtype, ops
from mithril_compat.language.block import Leaf, block, leaf
from mithril_compat.language.connection import TBD, Constant, operators

TINY = Constant.MIN_POSITIVE_NORMAL


def _unary(name: str, function: Callable[[Any], Any]) -> type[Leaf]:
    def compute(input: Any = TBD) -> Any:
        return function(input)

    return leaf(name, compute)


def _binary(name: str, function: Callable[[Any, Any], Any], cins: str = "left") -> type[Leaf]:
    def compute(left: Any = TBD, right: Any = TBD) -> Any:
        return function(left, right)

    return leaf(name, compute, cins=cins)


def is_tensor(x: Any) -> bool:
    return isinstance(x, Value)


def _bool_or_op(operation: Any, plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return the operation, and Python's for plain values."""
    return lambda *xs: operation(*xs) if any(map(is_tensor, xs)) else plain(*xs)


Absolute = _unary("Absolute", abs)
Negate = _unary("Negate", lambda x: -x)
Exponential = _unary("Exponential", _bool_or_op(ops.exp, math.exp))
Sine = _unary("Sine", _bool_or_op(ops.sin, math.sin))
Cosine = _unary("Cosine", _bool_or_op(ops.cos, math.cos))
Sign = _unary("Sign", ops.sign)
Square = _unary("Square", lambda x: x * x)
Floor = _unary("Floor", _bool_or_op(ops.floor, math.floor))
Relu = _unary("Relu", ops.relu)
Sigmoid = _unary("Sigmoid", ops.sigmoid)
Softplus = _unary("Softplus", ops.softplus)
Tanh = _unary("Tanh", ops.tanh)
SiLU = _unary("SiLU", ops.silu)
IsNan = _unary("IsNan", ops.isnan)
ZerosLike = _unary("ZerosLike", ops.zeros_like)
LogicalNot = _unary("LogicalNot", _bool_or_op(ops.logical_not, lambda x: not x))
Buffer = _unary("Buffer", lambda x: x)

Add = _binary("Add", lambda a, b: a + b, "left right")
Subtract = _binary("Subtract", lambda a, b: a - b)
Multiply = _binary("Multiply", lambda a, b: a * b, "left right")
MatrixMultiply = _binary("MatrixMultiply", lambda a, b: a @ b)
Minimum = _binary("Minimum", _bool_or_op(ops.minimum, min), "left right")
Maximum = _binary("Maximum", _bool_or_op(ops.maximum, max), "left right")
Equal = _binary("Equal", _bool_or_op(ops.equal, lambda a, b: a == b), "left right")
NotEqual = _binary("NotEqual", _bool_or_op(ops.not_equal, lambda a, b: a != b), "left right")
Greater = _binary("Greater", lambda a, b: a > b)
GreaterEqual = _binary("GreaterEqual", lambda a, b: a >= b)
Less = _binary("Less", lambda a, b: a < b)
LessEqual = _binary("LessEqual", lambda a, b: a <= b)
LogicalAnd = _binary("LogicalAnd", _bool_or_op(ops.logical_and, lambda a, b: a and b), "left right")
LogicalOr = _binary("LogicalOr", _bool_or_op(ops.logical_or, lambda a, b: a or b), "left right")
LogicalXOr = _binary("LogicalXOr", _bool_or_op(ops.logical_xor, lambda a, b: bool(a) != bool(b)), "left right")
CartesianDifference = _binary("CartesianDifference", lambda a, b: ops.unsqueeze(a, axis=1) - ops.unsqueeze(b, axis=0))


@block()
def Divide(numerator: Any = TBD, denominator: Any = TBD) -> Any:
    return numerator / denominator


@block()
def FloorDivide(numerator: Any = TBD, denominator: Any = TBD) -> Any:
    return numerator // denominator


@block()
def ShiftLeft(input: Any = TBD, shift: Any = TBD) -> Any:
    return _bool_or_op(ops.shift_left, lambda a, b: a << b)(input, shift)


@block()
def ShiftRight(input: Any = TBD, shift: Any = TBD) -> Any:
    return _bool_or_op(ops.shift_right, lambda a, b: a >> b)(input, shift)


def robust_log(x: Any, threshold: Any) -> Any:
    """Return log |x|, continued as a line below the threshold, so that gradients stay finite."""
    size = abs(x)
    return ops.where(
        size < threshold, math.log(threshold) + size / threshold - 1.0, ops.log(ops.maximum(size, threshold))
    )


def robust_sqrt(x: Any, threshold: Any) -> Any:
    """Return sqrt |x|, continued as a line below the threshold."""
    size = abs(x)
    return ops.where(size < threshold, size / math.sqrt(threshold), ops.sqrt(ops.maximum(size, threshold)))


def robust_power(base: Any, exponent: Any, threshold: Any) -> Any:
    """Return |base| ** exponent, continued as a line through 0 below the threshold for exponents below 1."""
    size = abs(base)
    safe = ops.maximum(size, threshold) ** exponent
    return ops.where(size < threshold, size / threshold * threshold**exponent if isinstance(exponent, (int, float)) else
                     size * ops.exp((exponent - 1.0) * math.log(threshold)), safe)  # fmt: skip


@block(options="robust")
def Log(robust: bool = False, input: Any = TBD, *, threshold: Any = TINY) -> Any:
    return robust_log(input, threshold) if robust else ops.log(input)


@block(options="robust")
def Sqrt(robust: bool = False, input: Any = TBD, *, threshold: Any = TINY) -> Any:
    if not is_tensor(input):
        return math.sqrt(input)
    return robust_sqrt(input, threshold) if robust else ops.sqrt(input)


@block(options="robust")
def Power(robust: bool = False, base: Any = TBD, exponent: Any = TBD, threshold: Any = TINY) -> Any:
    return robust_power(base, exponent, threshold) if robust else base**exponent


ACTIVATIONS = {
    "relu": ops.relu, "sigmoid": ops.sigmoid, "softplus": ops.softplus, "tanh": ops.tanh, "silu": ops.silu,
    "sin": ops.sin, "cos": ops.cos,
}  # fmt: skip


@block(options="formula_key")
def Activation(formula_key: Any = TBD, input: Any = TBD) -> Any:
    if formula_key not in ACTIVATIONS:
        raise ModelError(
            f"Activation has no formula key '{formula_key}'",
            facts=[f"accepted: {', '.join(ACTIVATIONS)}"],
            hint="declare an operation of your own: docs/writing-plugins.md",
        )
    return ACTIVATIONS[formula_key](input)


@block()
def LeakyRelu(slope: Any = 0.01, input: Any = TBD) -> Any:
    return (
        ops.leaky_relu(input, slope=float(slope))
        if not is_tensor(slope)
        else ops.where(input > 0, input, input * slope)
    )


@block()
def Gelu(approximate: Any = False, input: Any = TBD) -> Any:
    return ops.gelu(input, approximate="tanh" if approximate else "none")


@block()
def Softmax(input: Any = TBD, axis: Any = -1) -> Any:
    return ops.softmax(input, axis=axis)


@block()
def Clamp(input: Any = TBD, min_val: Any = TBD, max_val: Any = TBD) -> Any:
    return ops.clip(input, low=min_val, high=max_val)


@block(cins="input1")
def Where(cond: Any = TBD, input1: Any = TBD, input2: Any = TBD) -> Any:
    return ops.where(cond if cond.dtype.name == "bool" else ops.not_equal(cond, 0), input1, input2)


@block()
def NanToNum(nan: Any = 0.0, posinf: Any = None, neginf: Any = None, input: Any = TBD) -> Any:
    largest = float(np.finfo(input.dtype.numpy).max)
    y = ops.where(ops.isnan(input), nan, input)
    y = ops.where(ops.equal(y, math.inf), largest if posinf is None else posinf, y)
    return ops.where(ops.equal(y, -math.inf), -largest if neginf is None else neginf, y)


@block()
def StableReciprocal(input: Any = TBD, threshold: Any = Constant.STABLE_RECIPROCAL_THRESHOLD) -> Any:
    small = abs(input) < threshold
    line = 2.0 / threshold * (ops.where(input < 0.0, -1.0, 1.0)) - input / threshold**2
    return ops.where(small, line, 1.0 / ops.where(small, 1.0, input))


def _reduction(name: str, operation: Any, numbers: Callable[[Any], Any] | None = None, **extra: Any) -> type[Leaf]:
    def compute(axis: Any = None, keepdim: Any = False, input: Any = TBD) -> Any:
        return operation(input, axis=tuple(axis) if isinstance(axis, list) else axis, keepdims=bool(keepdim))

    return leaf(name, compute)


def _index_of(name: str, operation: Any) -> type[Leaf]:
    def compute(axis: Any = None, keepdim: Any = False, input: Any = TBD) -> Any:
        if axis is None:
            return operation(ops.reshape(input, shape=(-1,)), axis=0)
        return operation(input, axis=axis, keepdims=bool(keepdim))

    return leaf(name, compute)


Mean = _reduction("Mean", ops.mean)
Sum = _reduction(
    "Sum", lambda x, **where: ops.sum(ops.cast(x, dtype="int32") if x.dtype.name == "bool" else x, **where)
)
Max = _reduction("Max", ops.max)
Min = _reduction("Min", ops.min)
Prod = _reduction("Prod", ops.prod)
ArgMax = _index_of("ArgMax", ops.argmax)
ArgMin = _index_of("ArgMin", ops.argmin)


@block()
def Variance(axis: Any = None, keepdim: Any = False, correction: Any = 0.0, input: Any = TBD) -> Any:
    return ops.var(input, axis=axis, keepdims=bool(keepdim), ddof=int(correction or 0))


# -- shapes and Python values ------------------------------------------------------------------------------------------
@block()
def Shape(input: Any = TBD) -> Any:
    return tuple(input.shape)


@block()
def Size(dim: Any = None, input: Any = TBD) -> Any:
    if dim is None:
        return math.prod(input.shape)
    return input.shape[dim] if isinstance(dim, int) else tuple(input.shape[d] for d in dim)


@block()
def Length(input: Any = TBD) -> Any:
    return input.shape[0] if is_tensor(input) else len(input)


@block()
def Item(input: Any = TBD) -> Any:
    if not is_tensor(input):
        return input
    return ops.reshape(input, shape=())


@block()
def ToTensor(input: Any = TBD, dtype: Any = None, *, program: Any = None) -> Any:
    if is_tensor(input):
        return input if dtype is None else ops.cast(input, dtype=_dtype(dtype))
    if isinstance(input, (list, tuple)) and any(is_tensor(x) for x in input):
        return ops.stack(*(x if is_tensor(x) else program.context.as_value(np.asarray(x)) for x in input), axis=0)
    x = np.asarray(input)
    kind = _dtype(dtype) if dtype is not None else program.float_dtype if x.dtype.kind == "f" else "int32"
    return program.context.as_value(x.astype(as_dtype(kind).numpy if x.dtype.kind != "b" else bool))


@block()
def TensorToList(input: Any = TBD) -> Any:
    raise ModelError(
        "TensorToList turns elements into Python numbers, which a compiled program does not have",
        hint="declare the tensor as an output, and call .tolist() on the result",
    )


def _dtype(kind: Any) -> Any:
    return getattr(kind, "mithril_name", None) or {float: "float32", int: "int32", bool: "bool"}.get(kind, kind)


@block()
def Cast(dtype: Any = TBD, input: Any = TBD) -> Any:
    return input if dtype is None else ops.cast(input, dtype=_dtype(dtype))


@block()
def Dtype(input: Any = TBD) -> Any:
    return input.dtype


@block()
def AtLeast1D(input: Any = TBD, *, program: Any = None) -> Any:
    x = input if is_tensor(input) else program.context.as_value(np.asarray(input))
    return x if x.ndim else ops.reshape(x, shape=(1,))


@block(cins="")
def Slice(start: Any = TBD, stop: Any = TBD, step: Any = TBD) -> Any:
    return slice(start, stop, step)


@block()
def Indexer(index: Any = TBD, input: Any = TBD) -> Any:
    if is_tensor(input) and isinstance(index, (tuple, list)) and sum(map(is_tensor, index)) > 1:
        return _gathered(input, list(index))
    return input[index]


def _gathered(x: Any, index: list[Any]) -> Any:
    """Return the elements at arrays of positions on adjacent axes, one of which they become."""
    if ... in index:
        position = index.index(...)
        index[position : position + 1] = [slice(None)] * (x.ndim - len(index) + 1)
    axes = [k for k, part in enumerate(index) if is_tensor(part)]
    first, last = axes[0], axes[-1]
    if axes != list(range(first, last + 1)) or any(not isinstance(p, slice) for p in index if not is_tensor(p)):
        raise ModelError("arrays of positions are on adjacent axes, next to slices", facts=[f"index of {x.type}"])
    x = x[tuple(slice(None) if is_tensor(part) else part for part in index)]
    flat: Any = 0
    for axis in axes:
        size = x.shape[axis]
        place = ops.cast(index[axis], dtype="int32")
        flat = flat * size + ops.where(place < 0, place + size, place)
    merged = ops.reshape(x, shape=(*x.shape[:first], math.prod(x.shape[first : last + 1]), *x.shape[last + 1 :]))
    return ops.take(merged, flat, axis=first)


def _collector(title: str, make: Callable[..., Any], cins: bool = False) -> type[Leaf]:
    class Collector(Leaf):
        function = staticmethod(lambda **parts: make(parts.values()))

        def __init__(self, n: int = 1, *, name: str | None = None, **given: Any) -> None:
            super(Leaf, self).__init__(name)
            self.settings = {}
            self._declare({f"input{k + 1}": given.get(f"input{k + 1}", TBD) for k in range(n)})
            if not cins:
                self.cins = []

    Collector.__name__ = Collector.__qualname__ = title
    return Collector


ToTuple = _collector("ToTuple", tuple)
ToList = _collector("ToList", list)
PrimitiveUnion = _collector(
    "PrimitiveUnion", lambda parts: tuple(p for x in parts for p in (x if isinstance(x, (tuple, list)) else (x,))), True
)


@block()
def Reshape(shape: Any = TBD, input: Any = TBD) -> Any:
    return ops.reshape(input, shape=tuple(shape))


@block()
def Transpose(axes: Any = None, input: Any = TBD) -> Any:
    return ops.transpose(input, perm=None if axes is None else (axes,) if isinstance(axes, int) else tuple(axes))


@block()
def SwapAxes(axis1: Any, axis2: Any, input: Any = TBD) -> Any:
    order = list(range(input.ndim))
    order[axis1], order[axis2] = order[axis2], order[axis1]
    return ops.transpose(input, perm=tuple(order))


@block()
def Flatten(start_dim: Any = 0, end_dim: Any = -1, input: Any = TBD) -> Any:
    start, end = start_dim % input.ndim, end_dim % input.ndim
    shape = input.shape
    return ops.reshape(input, shape=(*shape[:start], math.prod(shape[start : end + 1]), *shape[end + 1 :]))


@block()
def Squeeze(input: Any = TBD) -> Any:
    return ops.squeeze(input)


@block()
def BroadcastTo(shape: Any = TBD, input: Any = TBD) -> Any:
    return ops.broadcast_to(input, shape=tuple(shape))


@block()
def Concat(input: Any = TBD, axis: Any = 0) -> Any:
    parts = input if isinstance(input, (list, tuple)) else [input]
    if axis is None:
        return ops.concat(*(ops.reshape(x, shape=(-1,)) for x in parts), axis=0)
    return ops.concat(*parts, axis=axis)


@block()
def Split(split_size: Any, axis: Any, input: Any = TBD) -> Any:
    size = input.shape[axis] // split_size
    return list(ops.split(input, sizes=(size,) * split_size, axis=axis))


@block()
def Pad(pad_width: Any = TBD, input: Any = TBD) -> Any:
    return ops.pad(input, widths=tuple(map(tuple, pad_width)))


@block(integers="indices")
def PermuteTensor(indices: Any = TBD, input: Any = TBD) -> Any:
    return ops.take(input, ops.cast(indices, dtype="int32"), axis=0)


@block()
def Arange(start: Any = 0, stop: Any = TBD, step: Any = 1, dtype: Any = None) -> Any:
    kind = {} if dtype is None else {"dtype": _dtype(dtype)}
    return ops.arange(start=start, stop=stop, step=step, **kind)


@block()
def Eye(N: Any = TBD, M: Any = None, dtype: Any = None, *, program: Any = None) -> Any:
    return ops.eye(n=N, m=M, dtype=_dtype(dtype) or program.float_dtype)


@block()
def EyeComplement(N: Any = TBD, M: Any = None, dtype: Any = None, *, program: Any = None) -> Any:
    return 1.0 - ops.eye(n=N, m=M, dtype=_dtype(dtype) or program.float_dtype)


@block(cins="")
def Ones(shape: Any = TBD, dtype: Any = None, *, program: Any = None) -> Any:
    return ops.ones(shape=tuple(shape), dtype=_dtype(dtype) or program.float_dtype)


@block(cins="")
def PrimitiveRandn(shape: Any = TBD, key: Any = TBD, dtype: Any = None, *, program: Any = None) -> Any:
    return ops.normal(program.key(), shape=tuple(shape), dtype=_dtype(dtype) or program.float_dtype)


@block(cins="")
def PrimitiveRandInt(
    shape: Any = TBD, key: Any = TBD, low: Any = TBD, high: Any = TBD, dtype: Any = None, *, program: Any = None
) -> Any:
    return ops.randint(program.key(), shape=tuple(shape), low=low, high=high)


@block(cins="")
def Randn(shape: Any = TBD, key: Any = 0, dtype: Any = None, *, program: Any = None) -> Any:
    return ops.normal(program.key(), shape=tuple(shape), dtype=_dtype(dtype) or program.float_dtype)


@block(cins="")
def RandInt(
    shape: Any = TBD, key: Any = 0, low: Any = TBD, high: Any = TBD, dtype: Any = None, *, program: Any = None
) -> Any:
    return ops.randint(program.key(), shape=tuple(shape), low=low, high=high)


@block()
def Unique(input: Any = TBD) -> Any:
    raise ModelError(
        "Unique returns as many elements as differ, which no compiled program knows",
        hint="mithril.ops.unique(x, size=n) returns n of them",
    )


@block(cins="y")
def Trapezoid(x: Any = TBD, y: Any = TBD) -> Any:
    return ops.sum((x[1:] - x[:-1]) * (y[1:] + y[:-1])) * 0.5


@block()
def PaddingConverter1D(kernel_size: Any = TBD, input: Any = TBD) -> Any:
    return padding_pairs(input, (kernel_size,))[0]


@block()
def PaddingConverter2D(kernel_size: Any = TBD, input: Any = TBD) -> Any:
    return padding_pairs(input, sizes(kernel_size, 2))


@block()
def StrideConverter(kernel_size: Any = TBD, input: Any = TBD) -> Any:
    return kernel_size if input is None else input


@block()
def TupleConverter(input: Any = TBD) -> Any:
    return sizes(input, 2)


def sizes(value: Any, rank: int) -> tuple[int, ...]:
    return (value,) * rank if isinstance(value, int) else tuple(value)


def padding_pairs(padding: Any, kernel: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Return the padding of each axis as (before, after), from a number, a pair, pairs, or "same"."""
    kind = getattr(padding, "name", padding)
    if isinstance(kind, str):
        if kind.lower() == "valid":
            return ((0, 0),) * len(kernel)
        if kind.lower() != "same":
            raise ModelError(f"padding '{kind}' is unknown", facts=["accepted: numbers, pairs, same, valid"])
        return tuple(((k - 1) // 2, (k - 1) - (k - 1) // 2) for k in kernel)
    if isinstance(padding, int):
        return ((padding, padding),) * len(kernel)
    if len(kernel) == 1:
        return (tuple(padding),)
    return tuple((p, p) if isinstance(p, int) else tuple(p) for p in padding)


operators.update(
    {
        "add": Add, "sub": Subtract, "mul": Multiply, "truediv": Divide, "floordiv": FloorDivide, "pow": Power,
        "matmul": MatrixMultiply, "and": LogicalAnd, "or": LogicalOr, "xor": LogicalXOr, "lshift": ShiftLeft,
        "rshift": ShiftRight, "gt": Greater, "ge": GreaterEqual, "lt": Less, "le": LessEqual, "eq": Equal,
        "ne": NotEqual, "neg": Negate, "invert": LogicalNot, "abs": Absolute, "len": Length, "shape": Shape,
        "tensor": ToTensor, "sqrt": Sqrt, "exp": Exponential, "item": Item, "dtype": Dtype, "sin": Sine,
        "cos": Cosine, "atleast_1d": AtLeast1D, "floor": Floor, "slice": Slice, "tuple": ToTuple, "list": ToList,
        "index": Indexer, "reshape": Reshape, "transpose": Transpose, "size": Size, "cast": Cast, "clamp": Clamp,
        "var": Variance, "mean": Mean, "sum": Sum, "max": Max, "min": Min, "prod": Prod,
    }
)  # fmt: skip
