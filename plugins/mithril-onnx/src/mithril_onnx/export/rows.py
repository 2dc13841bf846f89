"""Rows of element-wise operations, reductions and shapes."""

from __future__ import annotations

import math

import numpy as np

from mithril.graph import Node, UnsupportedError, is_static
from mithril_onnx.export.table import row
from mithril_onnx.tensors import code_of_dtype

SAME = {
    "abs": "Abs", "acos": "Acos", "acosh": "Acosh", "asin": "Asin", "asinh": "Asinh", "atan": "Atan", "atanh": "Atanh",
    "ceil": "Ceil", "cos": "Cos", "cosh": "Cosh", "erf": "Erf", "exp": "Exp", "floor": "Floor", "log": "Log",
    "neg": "Neg", "reciprocal": "Reciprocal", "round": "Round", "sign": "Sign", "sin": "Sin", "sinh": "Sinh",
    "sqrt": "Sqrt", "tan": "Tan", "tanh": "Tanh", "logical_not": "Not", "isnan": "IsNaN", "isinf": "IsInf",
    "sigmoid": "Sigmoid", "relu": "Relu", "softplus": "Softplus", "softsign": "Softsign", "hard_swish": "HardSwish",
    "add": "Add", "sub": "Sub", "mul": "Mul", "div": "Div", "pow": "Pow", "maximum": "Max", "minimum": "Min",
    "equal": "Equal", "less": "Less", "less_equal": "LessOrEqual", "greater": "Greater",
    "greater_equal": "GreaterOrEqual", "logical_and": "And", "logical_or": "Or", "logical_xor": "Xor",
    "where": "Where", "stop_gradient": "Identity",
}  # fmt: skip
NEWER = {
    "mish": ("Mish", 18), "bitwise_and": ("BitwiseAnd", 18), "bitwise_or": ("BitwiseOr", 18),
    "bitwise_xor": ("BitwiseXor", 18), "bitwise_not": ("BitwiseNot", 18),
}  # fmt: skip


def _plain(name, kind, since=1):
    @row(name, since=since)
    def write(w, node, *operands):
        return w.node(kind, *operands, stem=node.result.name)


for _name, _kind in SAME.items():
    _plain(_name, _kind)
for _name, (_kind, _since) in NEWER.items():
    _plain(_name, _kind, _since)


def scalar(w, node, value):
    """Return a number as a constant of the dtype of the first operand."""
    return w.constant(value, node.operands[0].dtype.numpy)


@row("barrier")
def _barrier(w, node, *operands):
    return [w.node("Identity", x) for x in operands]


@row("square")
def _square(w, node, x):
    return w.node("Mul", x, x)


@row("not_equal")
def _not_equal(w, node, a, b):
    return w.node("Not", w.node("Equal", a, b))


@row("rsqrt")
def _rsqrt(w, node, x):
    return w.node("Reciprocal", w.node("Sqrt", x))


@row("isfinite")
def _isfinite(w, node, x):
    return w.node("Not", w.node("Or", w.node("IsInf", x), w.node("IsNaN", x)))


@row("trunc")
def _trunc(w, node, x):
    return w.node("Mul", w.node("Sign", x), w.node("Floor", w.node("Abs", x)))


@row("expm1")
def _expm1(w, node, x):
    # With t = tanh(x / 2), exp(x) - 1 = 2 t / (1 - t), which loses no digits near 0.
    half = w.node("Tanh", w.node("Mul", x, scalar(w, node, 0.5)))
    exact = w.node("Div", w.node("Add", half, half), w.node("Sub", scalar(w, node, 1.0), half))
    large = w.node("Sub", w.node("Exp", x), scalar(w, node, 1.0))
    is_small = w.node("Less", w.node("Abs", x), scalar(w, node, 1.0))
    return w.node("Where", is_small, exact, large)


@row("log1p")
def _log1p(w, node, x):
    one = scalar(w, node, 1.0)
    # log(y) * x / (y - 1) with y = 1 + x: the errors of both factors cancel (Kahan).
    y = w.node("Add", x, one)
    rest = w.node("Sub", y, one)
    small = w.node("Equal", rest, scalar(w, node, 0.0))
    safe = w.node("Where", small, one, rest)
    corrected = w.node("Mul", w.node("Log", y), w.node("Div", x, safe))
    return w.node("Where", w.node("Or", small, w.node("IsInf", x)), w.node("Where", small, x, x), corrected)


@row("log2")
def _log2(w, node, x):
    return w.node("Mul", w.node("Log", x), scalar(w, node, 1 / math.log(2)))


@row("floordiv")
def _floordiv(w, node, a, b):
    if node.result.dtype.is_float:
        return w.node("Floor", w.node("Div", a, b))
    # Div of integers rounds toward zero: without the remainder it is exact.
    return w.node("Div", w.node("Sub", a, w.node("Mod", a, b)), b)


@row("mod")
def _mod(w, node, a, b):
    if not node.result.dtype.is_float:
        return w.node("Mod", a, b)
    return w.node("Sub", a, w.node("Mul", w.node("Floor", w.node("Div", a, b)), b))


@row("atan2")
def _atan2(w, node, y, x):
    zero, pi = scalar(w, node, 0.0), scalar(w, node, math.pi)
    left = w.node("Less", x, zero)
    axis = w.node("Equal", x, zero)
    angle = w.node("Atan", w.node("Div", y, w.node("Where", axis, scalar(w, node, 1.0), x)))
    turn = w.node("Where", w.node("Less", y, zero), w.node("Neg", pi), pi)
    beside = w.node("Where", left, w.node("Add", angle, turn), angle)
    vertical = w.node("Mul", w.node("Sign", y), scalar(w, node, math.pi / 2))
    return w.node("Where", axis, vertical, beside)


@row("clip", reads=("low", "high"))
def _clip(w, node, x):
    low, high = ("" if v is None else scalar(w, node, v) for v in (node.attributes["low"], node.attributes["high"]))
    return w.node("Clip", x, low, high)


@row("cast", reads=("dtype",))
def _cast(w, node, x):
    return w.node("Cast", x, to=code_of_dtype(node.attributes["dtype"]), stem=node.result.name)


@row("leaky_relu", reads=("slope",))
def _leaky_relu(w, node, x):
    return w.node("LeakyRelu", x, alpha=float(node.attributes["slope"]))


@row("elu", reads=("alpha",))
def _elu(w, node, x):
    return w.node("Elu", x, alpha=float(node.attributes["alpha"]))


@row("gelu", reads=("approximate",), since=20)
def _gelu(w, node, x):
    return w.node("Gelu", x, approximate=node.attributes["approximate"], stem=node.result.name)


# -- reductions ---------------------------------------------------------------------------------------------------
def reduce(w, kind, x, axes, keepdims):
    """Write a reduction; axes are an operand from opset 18 on (ReduceSum: 13)."""
    if w.opset >= 18 or kind == "ReduceSum":
        # No axes reduce nothing in the core, and all axes by the default of the standard.
        return w.node(kind, x, w.ints(axes), keepdims=int(keepdims), noop_with_empty_axes=1)
    return w.node(kind, x, axes=list(axes), keepdims=int(keepdims)) if axes else w.node("Identity", x)


def _axes(node):
    axis, rank = node.attributes["axis"], len(node.operands[0].shape)
    return tuple(range(rank)) if axis is None else tuple(axis)


for _name, _kind in {
    "sum": "ReduceSum",
    "mean": "ReduceMean",
    "prod": "ReduceProd",
    "max": "ReduceMax",
    "min": "ReduceMin",
}.items():

    def _reduction(w, node, x, kind=_kind):
        out = reduce(w, kind, x, _axes(node), node.attributes["keepdims"])
        return out if node.operands[0].dtype is node.result.dtype else w.cast(out, node.result.dtype)

    row(_name, reads=("axis", "keepdims"))(_reduction)


@row("any", "all", reads=("axis", "keepdims"))
def _any(w, node, x):
    # ONNX reduces bools from opset 20 on only.
    kind = "ReduceMax" if node.op.name == "any" else "ReduceMin"
    return w.cast(reduce(w, kind, w.cast(x, "int32"), _axes(node), node.attributes["keepdims"]), "bool")


@row("argmax", "argmin", reads=("axis", "keepdims"))
def _argmax(w, node, x):
    kind = "ArgMax" if node.op.name == "argmax" else "ArgMin"
    axis = node.attributes["axis"]
    return w.cast(w.node(kind, x, axis=axis, keepdims=int(node.attributes["keepdims"])), node.result.dtype)


@row("cumsum", reads=("axis", "reverse", "exclusive"))
def _cumsum(w, node, x):
    a = node.attributes
    axis = w.constant(np.asarray(a["axis"], np.int64))
    out = w.node("CumSum", x, axis, reverse=int(a["reverse"]), exclusive=int(a["exclusive"]))
    return out if node.operands[0].dtype is node.result.dtype else w.cast(out, node.result.dtype)


@row("sort", "argsort", reads=("axis", "descending"))
def _sort(w, node, x):
    axis = node.attributes["axis"]
    count = w.size(node.operands[0].shape[axis])
    values, places = w.node("TopK", x, count, results=2, axis=axis, largest=int(node.attributes["descending"]))
    return values if node.op.name == "sort" else w.cast(places, node.result.dtype)


# -- shapes -------------------------------------------------------------------------------------------------------
@row("reshape", reads=("shape",))
def _reshape(w, node, x):
    shape = node.attributes["shape"]
    zero = any(d == 0 for d in shape) or not is_static(tuple(shape))
    return w.node("Reshape", x, w.shape(shape), allowzero=int(zero) or None, stem=node.result.name)


@row("transpose", reads=("perm",))
def _transpose(w, node, x):
    return w.node("Transpose", x, perm=list(node.attributes["perm"]), stem=node.result.name)


@row("broadcast_to", reads=("shape",))
def _broadcast_to(w, node, x):
    return w.node("Expand", x, w.shape(node.attributes["shape"]))


@row("concat", reads=("axis",))
def _concat(w, node, *xs):
    return w.node("Concat", *xs, axis=node.attributes["axis"], stem=node.result.name)


@row("slice", reads=("starts", "stops", "steps", "axes"))
def _slice(w, node, x):
    a = node.attributes
    if not a["axes"]:
        return w.node("Identity", x)
    stops = [
        -(2**62) if step < 0 and isinstance(stop, int) and stop == -node.operands[0].shape[axis] - 1 else stop
        for stop, step, axis in zip(a["stops"], a["steps"], a["axes"], strict=True)
    ]
    return w.node("Slice", x, w.shape(a["starts"]), w.shape(stops), w.ints(a["axes"]), w.ints(a["steps"]))


@row("flip", reads=("axis",))
def _flip(w, node, x):
    axes = _axes(node)
    count = len(axes)
    return w.node("Slice", x, w.ints([-1] * count), w.ints([-(2**62)] * count), w.ints(axes), w.ints([-1] * count))


@row("pad", reads=("widths", "mode", "value"))
def _pad(w, node, x):
    a = node.attributes
    if a["mode"] in ("symmetric", "wrap"):  # not every runtime knows these modes
        for axis, (widths, n) in enumerate(zip(a["widths"], node.operands[0].shape, strict=True)):
            if any(widths):
                if not is_static((n, *widths)):
                    raise UnsupportedError(f"padding by mode '{a['mode']}' requires static sizes, axis {axis} is {n}")
                places = np.pad(np.arange(n), widths, mode=a["mode"])
                x = w.node("Gather", x, w.constant(places, np.int64), axis=axis)
        return x
    pads = [pair[0] for pair in a["widths"]] + [pair[1] for pair in a["widths"]]
    value = scalar(w, node, a["value"]) if a["mode"] == "constant" else ""
    if node.operands[0].dtype.is_bool:  # runtimes pad no bools
        inner = w.node("Pad", w.cast(x, "int32"), w.shape(pads), w.constant(int(a["value"]), np.int32), mode=a["mode"])
        return w.cast(inner, "bool")
    return w.node("Pad", x, w.shape(pads), value, mode=a["mode"])


@row("full", reads=("shape", "value", "dtype"))
def _full(w, node):
    a = node.attributes
    value = w.constant(a["value"], a["dtype"].numpy)
    return w.node("Expand", value, w.shape(a["shape"])) if a["shape"] else w.node("Identity", value)


@row("iota", reads=("shape", "axis", "dtype"))
def _iota(w, node):
    a = node.attributes
    shape, axis, kind = a["shape"], a["axis"], a["dtype"]
    # Longer ones are computed by nodes, which keeps files small.
    if is_static(tuple(shape)) and math.prod(shape) <= 4096:
        line = np.arange(shape[axis]).astype(kind.numpy)
        line = line.reshape([-1 if k == axis else 1 for k in range(len(shape))])
        return w.constant(np.broadcast_to(line, shape).copy(), stem=node.result.name)
    end = w.node("Squeeze", w.size(shape[axis]), w.ints([0]))
    line = w.node("Range", w.constant(np.asarray(0, np.int64)), end, w.constant(np.asarray(1, np.int64)))
    line = w.node("Reshape", w.cast(line, kind), w.ints([-1 if k == axis else 1 for k in range(len(shape))]))
    return w.node("Expand", line, w.shape(shape)) if len(shape) > 1 else line


@row("size_value", reads=("value",))
def _size_value(w, node):
    return w.cast(w.node("Squeeze", w.size(node.attributes["value"]), w.ints([0])), "int32")


@row("tril", "triu", reads=("k",))
def _tril(w, node, x):
    k = w.constant(np.asarray(node.attributes["k"], np.int64))
    return w.node("Trilu", x, k, upper=int(node.op.name == "triu"))


# -- indexing -----------------------------------------------------------------------------------------------------
def _index(w, node, name, k=1):
    """Return positions as int64 where their dtype is none of the standard's."""
    return name if node.operands[k].dtype.name in ("int32", "int64") else w.cast(name, "int64")


@row("take", reads=("axis",))
def _take(w, node, x, indices):
    return w.node("Gather", x, _index(w, node, indices), axis=node.attributes["axis"], stem=node.result.name)


@row("take_along_axis", reads=("axis",))
def _take_along_axis(w, node, x, indices):
    axis, full_shape = node.attributes["axis"], node.result.shape
    for k, value in enumerate(node.operands):  # the standard does not broadcast them
        shape = tuple(n if j == axis else full_shape[j] for j, n in enumerate(value.shape))
        if shape != value.shape:
            expanded = w.node("Expand", indices if k else x, w.shape(shape))
            x, indices = (x, expanded) if k else (expanded, indices)
    return w.node("GatherElements", x, _index(w, node, indices), axis=node.attributes["axis"])


@row("gather_nd", reads=("batch_dims",))
def _gather_nd(w, node, x, indices):
    return w.node("GatherND", x, w.cast(indices, "int64"), batch_dims=node.attributes["batch_dims"])


@row("scatter_nd", "scatter_nd_add")
def _scatter_nd(w, node, x, indices, updates):
    reduction = "add" if node.op.name == "scatter_nd_add" else None
    return w.node("ScatterND", x, w.cast(indices, "int64"), updates, reduction=reduction)


@row("dynamic_slice", reads=("sizes",))
def _dynamic_slice(w, node, x, starts):
    sizes, shape = node.attributes["sizes"], node.operands[0].shape
    begin = _clamped(w, starts, shape, sizes)
    return w.node("Slice", x, begin, w.node("Add", begin, w.shape(sizes)), w.ints(range(len(shape))))


def _clamped(w, starts, shape, sizes):
    """Return starts, one per axis, as int64 in bounds; negative ones count from the end."""
    starts = w.cast(starts, "int64")
    zero = w.ints([0])
    full_shape = w.shape(shape)
    wrapped = w.node("Where", w.node("Less", starts, zero), w.node("Add", starts, full_shape), starts)
    return w.node("Min", w.node("Max", wrapped, zero), w.node("Sub", full_shape, w.shape(sizes)))


def _differs_in_one_axis(node: Node) -> bool:
    x, update = node.operands[:2]
    assert x is not None
    assert update is not None
    return sum(a != b for a, b in zip(x.shape, update.shape, strict=True)) <= 1


@row("dynamic_update_slice", when=_differs_in_one_axis)
def _dynamic_update_slice(w, node, x, update, starts):
    """Write an update along one axis."""
    shape, sizes = node.operands[0].shape, node.operands[1].shape
    axis = next((k for k, (a, b) in enumerate(zip(shape, sizes, strict=True)) if a != b), None)
    if axis is None:
        return w.node("Identity", update)
    begin = w.node("Slice", _clamped(w, starts, shape, sizes), w.ints([axis]), w.ints([axis + 1]), w.ints([0]))
    steps = w.node("Range", w.constant(np.int64(0)), w.node("Squeeze", w.size(sizes[axis])), w.constant(np.int64(1)))
    places = w.node("Reshape", w.node("Add", begin, steps), w.ints([-1, *[1] * (len(shape) - 1 - axis)]))
    return w.node("ScatterElements", x, w.node("Expand", places, w.shape(sizes)), update, axis=axis)
