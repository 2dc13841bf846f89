"""Graphs on operands that samples do not have: all ranks, all dtypes, special values, long sums."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import numpy as np

from mithril.graph import ALL, Builder, DType, Graph, Value, dtype as as_dtype, operation as op
from mithril.ops import cond, scan, while_loop
from mithril_testing.running import Array
from mithril_testing.sample_arrays import random_array, special_array

SIZES = (2, 3, 2, 1, 3, 2)
RANKS = range(len(SIZES) + 1)
Calls = tuple[Graph, dict[str, Array]]


def ranked(rank: int) -> Calls:
    """Return element-wise operations, reductions, orders and movements of a value of a rank, along every axis."""
    shape = SIZES[:rank]
    with Builder(f"rank_{rank}") as b:
        x, row = b.input("x", shape), b.input("row", shape[1:])
        y = {"exp": op("exp")(x), "chain": op("tanh")(op("exp")(x) * x) - x, "row": x * row + 1.0}
        y |= {
            "where": op("where")(op("greater")(x, 0.0), x, row),
            "all": op("sum")(x),
            "flat": op("reshape")(x, shape=(-1,)),
        }
        y |= {"ones": op("reshape")(x, shape=(1, *shape, 1)), "cast": op("cast")(x, dtype="int32")}
        if rank < len(SIZES):
            y["wide"] = op("broadcast_to")(x, shape=(3, *shape))
        for axis in range(rank):
            y |= {f"sum{axis}": op("sum")(x, axis=axis), f"max{axis}": op("max")(x, axis=axis, keepdims=True)}
            y |= {f"sort{axis}": op("sort")(x, axis=axis), f"cumsum{axis}": op("cumsum")(x, axis=axis)}
            y |= {f"softmax{axis}": op("softmax")(x, axis=axis), f"flip{axis}": op("flip")(x, axis=axis)}
            y |= {
                f"concat{axis}": op("concat")(x, op("neg")(x), axis=axis),
                f"argmax{axis}": op("argmax")(x, axis=axis),
            }
            y[f"slice{axis}"] = op("slice")(
                x, starts=(shape[axis] - 1,), stops=(shape[axis],), steps=(1,), axes=(axis,)
            )
            y[f"take{axis}"] = op("take")(x, b.constant([shape[axis] - 1, 0, 0], "int32"), axis=axis)
            y[f"pad{axis}"] = op("pad")(x, widths=tuple((1, 2) if k == axis else (0, 0) for k in range(rank)))
            y[f"turned{axis}"] = op("transpose")(x, perm=(axis, *(k for k in range(rank) if k != axis)))
        if rank > 1:
            y |= {
                "mean": op("mean")(x, axis=(0, rank - 1)),
                "reversed": op("transpose")(x, perm=tuple(range(rank))[::-1]),
            }
            last = op("transpose")(x, perm=(*range(rank - 2), rank - 1, rank - 2))
            y |= {"product": op("matmul")(x, last), "norm": op("layer_norm")(x)}
    graph = b.build(y)
    rng = np.random.default_rng(rank)
    return graph, {i.name: np.asarray(rng.uniform(-2, 2, i.type.shape), np.float32) for i in graph.arguments}


def casts(dtypes: Collection[DType]) -> Calls:
    """Return a cast between all pairs of dtypes, of special values and random ones."""
    with Builder("casts") as b:
        y: dict[str, Any] = {}
        arguments = {}
        for source in (d for d in ALL if d in dtypes):
            arguments[source.name] = np.concatenate([special_array(source), random_array(source, 200)])
            x = b.input(source.name, arguments[source.name].shape, source)
            y |= {
                f"{source} to {kind}": op("cast")(x, dtype=kind)
                for kind in ALL
                if kind in dtypes and kind is not source
            }
    return b.build(y), arguments


def integers(dtypes: Collection[DType]) -> Calls:
    """Return reductions, orders and movements of integers of every width, beyond 32 bits and around the bounds."""
    arguments: dict[str, Array] = {}
    with Builder("integers") as b:
        y: dict[str, Any] = {}
        for kind in (d for d in ALL if d.is_integer and d in dtypes):
            values = np.concatenate([special_array(kind), random_array(kind, 140)])[:143].reshape(11, 13)
            x = b.input(kind.name, values.shape, kind)
            arguments[kind.name] = values
            for name in ("sum", "prod", "max", "min", "cumsum", "sort", "argsort", "argmax", "argmin", "flip"):
                y |= {f"{kind} {name}{axis}": op(name)(x, axis=axis) for axis in (0, 1)}
            index = b.constant([10, 0, 3], "int32")
            y |= {f"{kind} take": op("take")(x, index, axis=0), f"{kind} turned": op("transpose")(x, perm=(1, 0))}
            y |= {f"{kind} pad": op("pad")(x, widths=((1, 0), (0, 2)), value=1), f"{kind} tril": op("tril")(x)}
            y |= {f"{kind} concat": op("concat")(x, x, axis=1), f"{kind} where": op("where")(op("greater")(x, 1), x, 0)}
            y |= {f"{kind} top{k}": v for k, v in enumerate(op("top_k")(x, k=3))}
    return b.build(y), arguments


def special_rows(kind: DType) -> Calls:
    """Return reductions and orders along rows that hold nan, infinities, signed zeros and ties, short and long."""
    short = np.array(
        [
            [0.0, -0.0, 0.0, -0.0],
            [-0.0, -0.0, -0.0, -0.0],
            [np.nan, 1.0, 2.0, -1.0],
            [1.0, 2.0, 3.0, np.nan],
            [np.inf, 1.0, -1.0, 2.0],
            [-np.inf, 1.0, 1.0, 1.0],
            [np.inf, -np.inf, 0.0, 1.0],
            [-np.inf, -np.inf, -np.inf, -np.inf],
            [np.nan, np.nan, np.nan, np.nan],
            [1.0, 1.0, -1.0, -1.0],
        ]
    )
    long = np.random.default_rng(5).uniform(-1, 1, (len(short), 130))
    long[:, [3, 64, 100, 129]] = short
    with Builder("special_rows") as b:
        y: dict[str, Any] = {}
        for label, array in (("short", short), ("long", long)):
            x = b.input(label, array.shape, kind)
            for name in (
                "sum",
                "mean",
                "max",
                "min",
                "prod",
                "argmax",
                "argmin",
                "sort",
                "argsort",
                "cumsum",
                "softmax",
                "log_softmax",
                "logsumexp",
                "var",
            ):
                y |= {
                    f"{name} {label}{axis}": op(name)(x, axis=axis) for axis in ((0, 1) if label == "short" else (1,))
                }
            y |= {f"layer_norm {label}": op("layer_norm")(x), f"top {label}": op("top_k")(x, k=2)[0]}
            y |= {f"all {label}": op("max")(x), f"least {label}": op("min")(x)}
        zeros = b.input("zeros", (3, 70), kind)
        y |= {f"zeros {name}": op(name)(zeros, axis=1) for name in ("max", "min")}
        empty = b.input("empty", (3, 0), kind)
        y |= {f"empty {name}": op(name)(empty, axis=1) for name in ("sum", "prod", "mean", "max", "min", "cumsum")}
        y |= {f"empty {name} of columns": op(name)(empty, axis=0) for name in ("sum", "max", "softmax", "sort")}
    arguments = {"short": short, "long": long, "zeros": np.full((3, 70), -0.0), "empty": np.empty((3, 0))}
    return b.build(y), {n: a.astype(kind.numpy) for n, a in arguments.items()}


SIGNED = ("sort", "prod", "zeros")  # results of ``special_rows`` in which the signs of zeros are defined


def accumulation(kind: DType) -> Calls:
    """Return sums of a 16-bit float that are wrong unless they are computed in 32 bits."""
    with Builder("accumulation") as b:
        x, w = b.input("x", (3, 5_000), kind), b.input("w", (5_000, 4), kind)
        image, kernel = b.input("image", (1, 600, 4, 4), kind), b.input("kernel", (2, 600, 3, 3), kind)
        y = {"sum": op("sum")(x, axis=1), "mean": op("mean")(x, axis=1), "product": op("matmul")(x, w)}
        y |= {"var": op("var")(x, axis=1), "columns": op("mean")(w, axis=0), "all": op("mean")(x)}
        y |= {"softmax": op("sum")(op("softmax")(x, axis=1), axis=1), "norm": op("layer_norm")(x)}
        y |= {"conv": op("conv")(image, kernel), "pool": op("avg_pool")(image, kernel=(4, 4))}
        y["linear"] = op("linear")(x, op("transpose")(w, perm=(1, 0)))
    graph = b.build(y)
    rng = np.random.default_rng(6)
    return graph, {i.name: rng.uniform(0.5, 1.5, i.type.shape).astype(kind.numpy) for i in graph.arguments}


DIFFERENTIABLE = ("yes", "no", "last", "running", "back", "backward", "nested")  # of ``control_flow``


def control_flow() -> Calls:
    """Return branches, loops and scans: nested, in both directions, over nothing, reading values from outside."""
    with Builder("control_flow") as b:
        x, w, flag = b.input("x", (3,)), b.input("w", (3,)), b.input("flag", (), "bool")
        other = op("logical_not")(flag)
        y: dict[str, Any] = {}
        y["yes"] = cond(flag, lambda v: v * w + 1.0, lambda v: v - w, x)
        y["no"] = cond(other, lambda v: v * w + 1.0, lambda v: v - w, x)
        steps, none = b.input("steps", (4, 3)), b.input("none", (0, 3))
        y["last"], y["running"] = scan(lambda c, s: (c + s * w, op("tanh")(c)), x, steps)
        y["back"], y["backward"] = scan(lambda c, s: (c * 0.5 + s, c), x, steps, reverse=True)
        y["unmoved"], y["nothing"] = scan(lambda c, s: (c + s, c), x, none)
        y["nested"], _ = scan(lambda c, s: (cond(flag, lambda v: v + s, lambda v: v * s, c), c), x, steps)
        start = (b.constant(0, "int32"), x)
        y["count"], y["looped"] = while_loop(lambda s: op("less")(s[0], 5), lambda s: (s[0] + 1, s[1] * w + 0.5), start)
    graph = b.build(y)
    rng = np.random.default_rng(7)
    arguments: dict[str, Array] = {
        i.name: np.asarray(rng.uniform(-1, 1, i.type.shape), i.type.dtype.numpy) for i in graph.arguments
    }
    return graph, arguments | {"flag": np.array(True)}


def shared(kind: DType) -> Calls:
    """Return values several times, as they are and as views: inputs, parameters, constants, results."""
    with Builder("shared") as b:
        x, w, s = b.input("x", (4, 4), kind), b.param("w", (4, 4), kind), b.input("s", (), kind)
        constant = b.constant(np.arange(16).reshape(4, 4).astype(kind.numpy))
        y = op("add")(x, w)
        values: dict[str, Value] = {"x": x, "w": w, "s": s, "constant": constant, "y": y}
        outputs = dict(values)
        for name, value in values.items():
            outputs[f"{name} again"] = value
            outputs[f"{name} flat"] = op("reshape")(value, shape=(-1,))
            if value.ndim:
                outputs[f"{name} turned"] = op("transpose")(value, perm=(1, 0))
                outputs[f"{name} part"] = op("slice")(value, starts=(1,), stops=(3,), steps=(1,), axes=(0,))
                outputs[f"{name} flipped"] = op("flip")(value, axis=0)
            outputs[f"{name} wide"] = op("broadcast_to")(value, shape=(2, *value.shape))
            outputs[f"{name} cast"] = op("cast")(value, dtype=kind)
            for label, result in _unchanged(value):
                outputs[f"{name} {label}"] = result
    graph = b.build(outputs)
    return graph, {
        i.name: random_array(kind, 16, k)[: 16 if i.type.shape else 1].reshape(i.type.shape)
        for k, i in enumerate(graph.arguments)
    }


def _unchanged(x: Value) -> Iterator[tuple[str, Any]]:
    """Yield operations that change nothing here, whose result may therefore be the operand itself."""
    yield "clipped", op("clip")(x)
    yield "stopped", op("stop_gradient")(x)
    yield "barred", op("barrier")(x)[0]
    yield "spread", op("broadcast_to")(x, shape=x.shape)
    yield "shaped", op("reshape")(x, shape=x.shape)
    yield "summed", op("sum")(x, axis=())
    yield "largest", op("max")(x, axis=())
    if not x.dtype.is_float:
        yield "rounded", op("round")(x)
    if x.ndim:
        yield "padded", op("pad")(x, widths=((0, 0),) * x.ndim)
        yield "joined", op("concat")(x, axis=0)
        yield "ordered", op("transpose")(x, perm=tuple(range(x.ndim)))
        yield "sliced", op("slice")(x, starts=(0,), stops=(x.shape[0],), steps=(1,), axes=(0,))
        yield "repeated", op("repeat")(x, repeats=1, axis=0)
        yield "rolled", op("roll")(x, shift=(0,), axis=(0,))
        yield "split", op("split")(x, sizes=x.shape[:1], axis=0)[0]


def repeatable() -> Calls:
    """Return the operations whose order of adding, threads or random numbers might change from call to call."""
    with Builder("repeatable") as b:
        x, w, key = b.input("x", (33, 300)), b.param("w", (300, 70)), b.input("key", (2,), "uint32")
        y = op("softmax")(op("matmul")(x, w))
        index = b.input("index", (33,), "int32")
        image = op("reshape")(op("tanh")(x), shape=(1, 3, 33, 100))
        outputs = {"y": y, "total": op("sum")(x), "dropped": op("dropout")(y, key, p=0.5)}
        outputs["added"] = op("scatter_add")(b.input("table", (5, 70)), index, y)
        outputs["image"] = op("conv")(image, b.param("kernel", (8, 3, 3, 3)), padding=((1, 1), (1, 1)))
    graph = b.build(outputs)
    rng = np.random.default_rng(8)
    arguments: dict[str, Array] = {}
    for i in graph.arguments:
        if i.type.dtype.is_float:
            arguments[i.name] = rng.uniform(-1, 1, i.type.shape).astype(np.float32)
        else:
            arguments[i.name] = rng.integers(0, 5, i.type.shape).astype(i.type.dtype.numpy)
    return graph, arguments


def kinds(dtypes: Collection[DType], *names: str) -> list[DType]:
    """Return those of the named dtypes that a backend has."""
    return [as_dtype(n) for n in names if as_dtype(n) in dtypes]
