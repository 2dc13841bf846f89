"""Graphs drawn at random from a seed: what no sample thinks of, operations after one another in every order."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from mithril.graph import Builder, Graph, Value
from mithril.graph.registry import operation as op

UNARY = ("abs", "neg", "tanh", "sigmoid", "relu", "gelu", "silu", "square", "sin", "cos", "erf", "softsign")
BINARY = ("add", "sub", "mul", "maximum", "minimum")
REDUCTIONS = ("sum", "mean", "max", "min")
NORMALISING = ("softmax", "log_softmax", "layer_norm")


def random_graph(seed: int, size: int = 14) -> Graph:
    """About ``size`` operations on float32 values of up to four axes, all results bounded so that none overflows."""
    rng = random.Random(seed)
    with Builder(f"random_{seed}") as b:
        values = [b.input(f"x{k}", _shape(rng)) for k in range(rng.randint(1, 3))]
        for _ in range(size):
            made = rng.choice(MOVES)(rng, values, b)
            if made is not None:
                values.append(op("tanh")(made) if rng.random() < 0.3 else made)
        read = {v for n in b.nodes for v in n.operands}
        ends = [v for v in values if v not in read] or values[-1:]
        return b.build({f"y{k}": v for k, v in enumerate(ends)})


def _shape(rng: random.Random) -> tuple[int, ...]:
    return tuple(rng.choice((1, 2, 3, 4)) for _ in range(rng.randint(1, 4)))


def _unary(rng: random.Random, values: list[Value], b: Builder) -> Any:
    return op(rng.choice(UNARY))(rng.choice(values))


def _binary(rng: random.Random, values: list[Value], b: Builder) -> Any:
    """Two values whose shapes broadcast; else a value and a parameter of its last axis."""
    x = rng.choice(values)
    fitting = [v for v in values if _broadcasts(v, x)]
    y = rng.choice(fitting) if rng.random() < 0.7 else b.input(f"p{len(b.inputs)}", x.shape[-1:])
    return op(rng.choice(BINARY))(x, y)


def _broadcasts(a: Value, b: Value) -> bool:
    return all(m == n or 1 in (m, n) for m, n in zip(reversed(a.shape), reversed(b.shape), strict=False))


def _reduce(rng: random.Random, values: list[Value], b: Builder) -> Any:
    x = rng.choice(values)
    if x.ndim == 0:
        return None
    axes = rng.sample(range(x.ndim), rng.randint(1, x.ndim))
    return op(rng.choice(REDUCTIONS))(x, axis=tuple(axes), keepdims=rng.random() < 0.5)


def _normalise(rng: random.Random, values: list[Value], b: Builder) -> Any:
    x = rng.choice(values)
    return op(rng.choice(NORMALISING))(x) if x.ndim else None


def _transpose(rng: random.Random, values: list[Value], b: Builder) -> Any:
    x = rng.choice(values)
    return op("transpose")(x, perm=tuple(rng.sample(range(x.ndim), x.ndim))) if x.ndim else None


def _reshape(rng: random.Random, values: list[Value], b: Builder) -> Any:
    x = rng.choice(values)
    sizes = [d for d in x.shape if isinstance(d, int)]
    if len(sizes) > 1 and rng.random() < 0.6:
        k = rng.randrange(len(sizes) - 1)
        sizes[k : k + 2] = [sizes[k] * sizes[k + 1]]
    else:
        sizes.insert(rng.randint(0, len(sizes)), 1)
    return op("reshape")(x, shape=tuple(sizes)) if len(sizes) <= 5 else None


def _slice(rng: random.Random, values: list[Value], b: Builder) -> Any:
    x = rng.choice(values)
    if not x.ndim:
        return None
    axis = rng.randrange(x.ndim)
    size = int(x.shape[axis])
    return op("take")(x, b.constant([rng.randrange(size) for _ in range(rng.randint(1, 3))], "int32"), axis=axis)


def _concat(rng: random.Random, values: list[Value], b: Builder) -> Any:
    x = rng.choice(values)
    same = [v for v in values if v.shape == x.shape]
    return op("concat")(x, rng.choice(same), axis=rng.randrange(x.ndim)) if x.ndim > 0 and _small(x) else None


def _product(rng: random.Random, values: list[Value], b: Builder) -> Any:
    x = rng.choice(values)
    if not x.ndim:
        return None
    w = b.input(f"w{len(b.inputs)}", (rng.choice((1, 2, 5)), x.shape[-1]))
    return op("linear")(x, w) if x.ndim > 1 else None


def _choose(rng: random.Random, values: list[Value], b: Builder) -> Any:
    x = rng.choice(values)
    return op("where")(op("greater")(x, 0.0), x, op("neg")(x) * 0.5)


def _small(x: Value) -> bool:
    return all(isinstance(d, int) and d <= 8 for d in x.shape)


MOVES: tuple[Callable[[random.Random, list[Value], Builder], Any], ...] = (
    _unary,
    _unary,
    _binary,
    _binary,
    _reduce,
    _normalise,
    _transpose,
    _reshape,
    _slice,
    _concat,
    _product,
    _choose,
)
