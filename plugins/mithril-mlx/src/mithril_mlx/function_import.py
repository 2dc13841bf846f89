"""Import of Python functions of MLX arrays as graphs: MLX traces the function, each primitive becomes an operation.

The trace comes from ``mx.export_function``: shapes are those of the sample arrays, and only the branches taken for them
are traced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from mithril.graph import Builder, Graph, UnsupportedError, Value, dtype as as_dtype, operation
from mithril_mlx.backend import MlxBackend
from mithril_mlx.mlx_loader import mx

ELEMENTWISE = {
    "Abs": "abs",
    "Add": "add",
    "ArcCos": "acos",
    "ArcCosh": "acosh",
    "ArcSin": "asin",
    "ArcSinh": "asinh",
    "ArcTan": "atan",
    "ArcTan2": "atan2",
    "ArcTanh": "atanh",
    "Ceil": "ceil",
    "Cos": "cos",
    "Cosh": "cosh",
    "Divide": "div",
    "Equal": "equal",
    "Erf": "erf",
    "ErfInv": "erfinv",
    "Exp": "exp",
    "Expm1": "expm1",
    "Floor": "floor",
    "Greater": "greater",
    "GreaterEqual": "greater_equal",
    "Less": "less",
    "LessEqual": "less_equal",
    "Log1p": "log1p",
    "LogicalAnd": "logical_and",
    "LogicalNot": "logical_not",
    "LogicalOr": "logical_or",
    "Maximum": "maximum",
    "Minimum": "minimum",
    "Multiply": "mul",
    "Negative": "neg",
    "NotEqual": "not_equal",
    "Power": "pow",
    "Remainder": "mod",
    "Round": "round",
    "Select": "where",
    "Sigmoid": "sigmoid",
    "Sign": "sign",
    "Sin": "sin",
    "Sinh": "sinh",
    "Square": "square",
    "Subtract": "sub",
    "Tan": "tan",
    "Tanh": "tanh",
}
SAME = frozenset({"Contiguous", "Copy", "Full", "StopGradient"})
REDUCTIONS = ("all", "any", "sum", "prod", "min", "max")
BITWISE = ("and", "or", "xor")
LOGARITHMS = (np.log(2.0), np.log(10.0), None)
Row = Callable[..., Any]


def import_function(function: Callable[..., Any], *arrays: Any, name: str | None = None) -> Graph:
    """Trace ``function(*arrays)`` to a graph. Inputs are named x0, x1, …; outputs y0, y1, …"""
    records: dict[str, list[Any]] = {"inputs": [], "outputs": [], "constants": [], "primitive": []}

    def note(entry: Mapping[str, Any]) -> None:
        kind = entry["type"]
        if kind == "primitive":
            records[kind].append(entry)
        elif kind in records:
            records[kind] = entry[kind]

    mx.export_function(note, function, *arrays)
    importer = _Importer(name if name is not None else str(getattr(function, "__name__", "imported")))
    return importer.run(**{k.rstrip("s") if k == "primitive" else k: v for k, v in records.items()})


class _Importer:
    def __init__(self, name: str) -> None:
        self.builder = Builder(name)
        self.values: dict[str, Value] = {}
        self.broad: dict[str, tuple[Value, tuple[int, ...]]] = {}  # raw, and its shape

    def run(self, inputs: Any, outputs: Any, constants: Any, primitive: Any) -> Graph:
        backend = MlxBackend()
        with self.builder as b:
            for k, (key, shape, kind) in enumerate(inputs):
                self.values[key] = b.input(f"x{k}", shape, _dtype(kind))
            for key, array in constants:
                data = backend.to_numpy(array)
                self.values[key] = b.constant(data.item() if data.ndim == 0 else data, _dtype(array.dtype))
            for entry in primitive:
                self.step(entry)
            return b.build({f"y{k}": self.value(key) for k, (key, *_) in enumerate(outputs)})

    def value(self, key: str) -> Value:
        if key not in self.values:
            raw, shape = self.broad[key]
            self.values[key] = operation("broadcast_to")(raw, shape=shape)
        return self.values[key]

    def step(self, entry: Mapping[str, Any]) -> None:
        name, arguments = entry["name"], entry["arguments"]
        operands, results = [key for key, *_ in entry["inputs"]], entry["outputs"]
        key, shape, kind = results[0]
        if name == "Broadcast":
            raw = self.broad[operands[0]][0] if operands[0] in self.broad else self.value(operands[0])
            self.broad[key] = (raw, tuple(shape))
            return
        if name in ELEMENTWISE:
            result: Any = self.elementwise(ELEMENTWISE[name], operands, tuple(shape))
        elif name in SAME:
            result = self.value(operands[0])
        elif name in ROWS:
            result = ROWS[name]([self.value(o) for o in operands], arguments, tuple(shape))
        else:
            raise UnsupportedError(
                f"MLX's primitive '{name}' cannot be imported",
                facts=[
                    f"with the arguments {arguments}",
                    f"importable: {', '.join(sorted({*ELEMENTWISE, *SAME, *ROWS}))}",
                ],
            )
        for value, (key, _, kind) in zip(result if isinstance(result, list) else [result], results, strict=True):
            target_dtype = _dtype(kind)
            self.values[key] = value if value.dtype is target_dtype else operation("cast")(value, dtype=target_dtype)

    def elementwise(self, name: str, keys: Sequence[str], shape: tuple[int, ...]) -> Value:
        """Import an element-wise primitive; the operation broadcasts operands unless that changes the shape."""
        raw = [self.broad[k][0] if k in self.broad else self.value(k) for k in keys]
        if np.broadcast_shapes(*(v.shape for v in raw)) != shape:
            raw = [self.value(k) for k in keys]
        result: Value = operation(name)(*raw)
        return result


def _dtype(kind: Any) -> Any:
    return as_dtype(str(kind).rpartition(".")[2].rstrip("_"))


def _op(name: str, *operands: Any, **attributes: Any) -> Any:
    return operation(name)(*operands, **attributes)


def _addmm(v: list[Value], arguments: Any, shape: Any) -> Any:
    alpha, beta = arguments
    product = _op("matmul", v[0], v[1])
    added = v[2] if beta == 1 else v[2] * float(beta)
    return (product if alpha == 1 else product * float(alpha)) + added


def _reduce(v: list[Value], arguments: Any, shape: Any) -> Any:
    which, axes = arguments
    return _op(REDUCTIONS[which], v[0], axis=tuple(axes), keepdims=True)


def _argreduce(v: list[Value], arguments: Any, shape: Any) -> Any:
    which, axis = arguments
    return _op(("argmin", "argmax")[which], v[0], axis=axis, keepdims=True)


def _logarithm(v: list[Value], arguments: Any, shape: Any) -> Any:
    base = LOGARITHMS[arguments[0]]
    result = _op("log", v[0])
    return result if base is None else result / float(base)


def _sqrt(v: list[Value], arguments: Any, shape: Any) -> Any:
    return _op("rsqrt" if arguments[0] else "sqrt", v[0])


def _reshape(v: list[Value], arguments: Any, shape: Any) -> Any:
    return _op("reshape", v[0], shape=shape)


def _slice(v: list[Value], arguments: Any, shape: Any) -> Any:
    starts, stops, steps = arguments
    axes = tuple(range(len(starts)))
    return _op("slice", v[0], starts=tuple(starts), stops=tuple(stops), steps=tuple(steps), axes=axes)


def _split(v: list[Value], arguments: Any, shape: Any) -> Any:
    position, axis = arguments
    bounds = [0, *position, v[0].shape[axis]]
    sizes = tuple(int(b) - int(a) for a, b in pairwise(bounds))
    return list(_op("split", v[0], sizes=sizes, axis=axis))


def _pad(v: list[Value], arguments: Any, shape: Any) -> Any:
    axes, low, high = arguments
    widths = [(0, 0) for _ in v[0].shape]
    for axis, before, after in zip(axes, low, high, strict=True):
        widths[axis] = (before, after)
    return _op("pad", v[0], widths=tuple(widths), value=_number(v[1]))


def _number(value: Value) -> Any:
    """Return the value of a constant of the trace, or None."""
    node = next((n for n in Builder.current().nodes if n.result is value and n.is_constant), None)
    if node is None:
        raise UnsupportedError("MLX's padding with a computed value cannot be imported")
    return node.attributes["value"]


def _scan(v: list[Value], arguments: Any, shape: Any) -> Any:
    which, axis, reverse, inclusive = arguments
    if which not in (2, 3):
        raise UnsupportedError("MLX's cumulative maxima and minima cannot be imported")
    return _op(("cumsum", "cumprod")[which - 2], v[0], axis=axis, reverse=reverse, exclusive=not inclusive)


def _gather(v: list[Value], arguments: Any, shape: Any) -> Any:
    """Convert a gather to ``take`` along one axis, as produced by ``mx.take`` and indexing with one array."""
    axes, sizes = arguments
    x, *indices = v
    axis = axes[0]
    full_sizes = [int(n) for k, n in enumerate(x.shape) if k != axis]
    if len(axes) != 1 or [n for k, n in enumerate(sizes) if k != axis] != full_sizes or sizes[axis] != 1:
        raise UnsupportedError("MLX's indexing with several arrays at once cannot be imported")
    order = (axis, *(k for k in range(len(x.shape)) if k != axis))
    rows = _op("take", _op("transpose", x, perm=order) if axis else x, indices[0], axis=0)
    return _op("reshape", rows, shape=shape)


def _convolution(v: list[Value], arguments: Any, shape: Any) -> Any:
    """Import a convolution; MLX stores channels last in images and weights, mithril second."""
    strides, low, high, dilation, spread, groups, flip = arguments
    if any(s != 1 for s in spread) or flip:
        raise UnsupportedError("MLX's transposed convolutions cannot be imported")
    rank = len(v[0].shape)
    first, last = (0, rank - 1, *range(1, rank - 1)), (0, *range(2, rank), 1)
    result = _op(
        "conv",
        _op("transpose", v[0], perm=first),
        _op("transpose", v[1], perm=first),
        stride=tuple(strides),
        padding=tuple(zip(low, high, strict=True)),
        dilation=tuple(dilation),
        groups=groups,
    )
    return _op("transpose", result, perm=last)


def _bitwise(v: list[Value], arguments: Any, shape: Any) -> Any:
    if arguments[0] >= len(BITWISE):
        return _op("shift_left" if arguments[0] == len(BITWISE) else "shift_right", *v)
    return _op(f"{'logical' if v[0].dtype.is_bool else 'bitwise'}_{BITWISE[arguments[0]]}", *v)


ROWS: dict[str, Row] = {
    "AddMM": _addmm,
    "ArgReduce": _argreduce,
    "ArgSort": lambda v, a, s: _op("argsort", v[0], axis=a[0]),
    "AsType": lambda v, a, s: v[0],  # every result is cast to the dtype that MLX infers
    "BitwiseBinary": _bitwise,
    "Concatenate": lambda v, a, s: _op("concat", *v, axis=a[0]),
    "Convolution": _convolution,
    "ExpandDims": _reshape,
    "Flatten": _reshape,
    "Gather": _gather,
    "GatherAxis": lambda v, a, s: _op("take_along_axis", v[0], v[1], axis=a[0]),
    "Log": _logarithm,
    "LogSumExp": lambda v, a, s: _op("logsumexp", v[0], axis=(-1,), keepdims=True),
    "Matmul": lambda v, a, s: _op("matmul", v[0], v[1]),
    "Pad": _pad,
    "Reduce": _reduce,
    "Reshape": _reshape,
    "Scan": _scan,
    "Slice": _slice,
    "Softmax": lambda v, a, s: _op("softmax", v[0], axis=-1),
    "Sort": lambda v, a, s: _op("sort", v[0], axis=a[0]),
    "Split": _split,
    "Sqrt": _sqrt,
    "Squeeze": _reshape,
    "Transpose": lambda v, a, s: _op("transpose", v[0], perm=tuple(a[0])),
    "Unflatten": _reshape,
}
