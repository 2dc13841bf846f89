"""Random graphs from a seed: sequences of operations in orders that samples do not cover."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

from mithril.graph import Builder, Graph, Value, operation as op, operation_names

UNARY = operation_names(
    "abs", "neg", "tanh", "sigmoid", "relu", "gelu", "silu", "square", "sin", "cos", "erf", "softsign"
)
BINARY = operation_names("add", "sub", "mul", "maximum", "minimum")
REDUCTIONS = operation_names("sum", "mean", "max", "min")
SMALL = (1, 2, 3, 4)
WIDE = (1, 2, 3, 5, 7, 8, 12, 16, 17, 24, 33)  # sizes that are and are not multiples of the tile and vector widths
LARGEST = 40_000  # elements of a value


def random_graph(seed: int, size: int = 14, sizes: Sequence[int] = SMALL) -> Graph:
    """About ``size`` operations on float32 values of up to four axes, all results bounded so that none overflows."""
    rng = random.Random(seed)
    with Builder(f"random_{seed}") as b:
        values = [b.input(f"x{k}", _shape(rng, sizes)) for k in range(rng.randint(1, 3))]
        for _ in range(size):
            results = rng.choice(MOVES)(rng, values, b)
            if results is not None and math.prod(results.shape) <= LARGEST:
                values.append(op("tanh")(results) if rng.random() < 0.3 else results)
        read = {v for n in b.nodes for v in n.operands}
        ends = [v for v in values if v not in read] or values[-1:]
        return b.build({f"y{k}": v for k, v in enumerate(ends)})


def _shape(rng: random.Random, sizes: Sequence[int]) -> tuple[int, ...]:
    shape = [rng.choice(sizes) for _ in range(rng.randint(1, 4))]
    while math.prod(shape) > LARGEST // 2:
        shape[shape.index(max(shape))] = rng.choice(SMALL)
    return tuple(shape)


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


def _normalize(rng: random.Random, values: list[Value], b: Builder) -> Any:
    x = rng.choice(values)
    if not x.ndim:
        return None
    if rng.random() < 0.3:
        return op("layer_norm")(x)
    return op(rng.choice(("softmax", "log_softmax")))(x, axis=rng.choice((-1, rng.randrange(x.ndim))))


def _running(rng: random.Random, values: list[Value], b: Builder) -> Any:
    x = rng.choice(values)
    if not x.ndim:
        return None
    axis = rng.randrange(x.ndim)
    return op("sort")(x, axis=axis) if rng.random() < 0.4 else op("cumsum")(x, axis=axis) * 0.2


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
    candidates = [v for v in values if v.shape == x.shape]
    return op("concat")(x, rng.choice(candidates), axis=rng.randrange(x.ndim)) if x.ndim > 0 and _small(x) else None


def _product(rng: random.Random, values: list[Value], b: Builder) -> Any:
    """Emit a linear layer, or a product with one matrix or a batch of them, transposed or not."""
    x = rng.choice(values)
    if x.ndim < 2:
        return None
    name, n, k = f"w{len(b.inputs)}", rng.choice((1, 2, 5, 8, 17)), x.shape[-1]
    if rng.random() < 0.4:
        return op("linear")(x, b.input(name, (n, k)))
    lead = x.shape[:-2] if rng.random() < 0.5 else ()
    w = _transpose_last_two(b.input(name, (*lead, n, k))) if rng.random() < 0.4 else b.input(name, (*lead, k, n))
    return op("matmul")(x, w) * 0.3


def _transpose_last_two(x: Value) -> Any:
    return op("transpose")(x, perm=(*range(x.ndim - 2), x.ndim - 1, x.ndim - 2))


def _attend(rng: random.Random, values: list[Value], b: Builder) -> Any:
    x = rng.choice(values)
    if x.ndim < 2:
        return None
    scores = op("matmul")(x, _transpose_last_two(op("tanh")(x) if rng.random() < 0.5 else x)) * 0.3
    if rng.random() < 0.5:
        scores = scores + b.input(f"a{len(b.inputs)}", scores.shape[-2:])
    return op("matmul")(op("softmax")(scores), x)


def _convolve(rng: random.Random, values: list[Value], b: Builder) -> Any:
    """Images of any channels, ragged groups, strides, paddings and dilations."""
    x = rng.choice(values)
    if x.ndim == 3:
        x = op("reshape")(x, shape=(1, *x.shape))
    if x.ndim != 4:
        return None
    channels = int(x.shape[1])
    groups = rng.choice([1, 1, *(g for g in (2, 3, channels) if channels % g == 0)])
    kernel = _two(rng, (1, 2, 3))
    stride, dilation = _two(rng, (1, 1, 2)), _two(rng, (1, 1, 2))
    padding = tuple((rng.randint(0, 1), rng.randint(0, 1)) for _ in kernel)
    if any(
        int(n) + sum(p) < d * (k - 1) + 1 for n, k, p, d in zip(x.shape[2:], kernel, padding, dilation, strict=True)
    ):
        return None
    out_channels = groups * rng.choice((1, 2, 3, 8))
    w = b.input(f"k{len(b.inputs)}", (out_channels, channels // groups, *kernel))
    return op("conv")(x, w, stride=stride, padding=padding, dilation=dilation, groups=groups) * 0.3


def _pool(rng: random.Random, values: list[Value], b: Builder) -> Any:
    x = rng.choice(values)
    if x.ndim != 4:
        return None
    kernel = _two(rng, (1, 2, 3))
    if any(int(n) < k for n, k in zip(x.shape[2:], kernel, strict=True)):
        return None
    padding = tuple((rng.randint(0, k // 2), rng.randint(0, k // 2)) for k in kernel)
    return op(rng.choice(("max_pool", "avg_pool")))(x, kernel=kernel, stride=_two(rng, (1, 2)), padding=padding)


def _two(rng: random.Random, choices: tuple[int, ...]) -> tuple[int, int]:
    return rng.choice(choices), rng.choice(choices)


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
    _normalize,
    _transpose,
    _reshape,
    _slice,
    _concat,
    _product,
    _product,
    _attend,
    _convolve,
    _convolve,
    _pool,
    _running,
    _choose,
)
