"""Random graphs of many operations, shapes and layouts, for differential and endurance tests."""

from __future__ import annotations

from typing import Any

import numpy as np

from mithril.graph import Builder, Graph, Value
from mithril.graph.errors import MithrilError
from mithril.graph.registry import operation as op

SIZES = (1, 1, 2, 3, 4, 5, 7, 8, 33, 64)
UNARY = (
    "tanh",
    "neg",
    "abs",
    "sigmoid",
    "silu",
    "relu",
    "gelu",
    "square",
    "floor",
    "round",
    "sin",
    "cos",
    "erf",
    "exp",
)
BINARY = ("add", "sub", "mul", "maximum", "minimum", "div")


def shape(rng: np.random.Generator, rank: int | None = None, limit: int = 20000) -> tuple[int, ...]:
    """Sizes whose product stays small."""
    while True:
        shape = tuple(int(rng.choice(SIZES)) for _ in range(int(rng.integers(0, 7)) if rank is None else rank))
        if np.prod(shape, dtype=np.int64) <= limit:
            return shape


def broadcastable(rng: np.random.Generator, full: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape that broadcasts to another."""
    shape = tuple(1 if rng.random() < 0.3 else n for n in full)
    return shape[int(rng.integers(0, len(shape) + 1)) :] if rng.random() < 0.4 else shape


class Maker:
    """Grows a graph by random operations."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.arrays: dict[str, Any] = {}
        self.builder = Builder(f"random{seed}")
        self.values: list[Value] = []

    def input(self, shape: tuple[int, ...], role: str = "") -> Value:
        name = f"x{len(self.arrays)}"
        self.arrays[name] = self.rng.standard_normal(shape).astype(np.float32)
        input_role = role or ("param" if self.rng.random() < 0.3 else "input")
        return self.builder.input(name, shape, "float32", input_role)

    def pick(self) -> Value:
        return self.values[int(self.rng.integers(0, len(self.values)))]

    def graph(self, steps: int) -> Graph:
        with self.builder:
            self.values = [self.input(shape(self.rng)) for _ in range(3)]
            for _ in range(steps):
                try:
                    value = self.step()
                except (MithrilError, IndexError):
                    continue  # the operation does not take this shape
                if value.dtype.is_float and np.prod(value.shape, dtype=np.int64) <= 40000:
                    self.values.append(value)
        outputs = list(dict.fromkeys(self.values[-4:]))
        return self.builder.build({f"y{k}": v for k, v in enumerate(outputs)})

    def step(self) -> Value:
        rng, x = self.rng, self.pick()
        rank = len(x.shape)
        axis = int(rng.integers(0, rank)) if rank else 0
        kind = int(rng.integers(0, 20))
        if kind < 3:
            return op(str(rng.choice(UNARY)))(x)
        if kind < 6:
            other = self.pick() if rng.random() < 0.5 else self.input(broadcastable(rng, x.shape))
            pair = (x, other) if rng.random() < 0.5 else (other, x)
            return op(str(rng.choice(BINARY)))(*pair)
        if kind == 6:
            return op(str(rng.choice(["add", "mul", "sub"])))(x, float(rng.standard_normal()))
        if kind == 7:
            return op("transpose")(x, perm=tuple(int(k) for k in rng.permutation(rank)))
        if kind == 8:
            return op("reshape")(x, shape=(-1,) if rng.random() < 0.5 or rank < 2 else (x.shape[0], -1))
        if kind == 9:
            start = int(rng.integers(0, x.shape[axis]))
            return op("slice")(
                x, starts=(start,), stops=(x.shape[axis],), steps=(int(rng.choice([1, 2])),), axes=(axis,)
            )
        if kind == 10:
            return op("flip")(x, axis=(axis,))
        if kind == 11:
            return op(str(rng.choice(["sum", "mean", "max", "min"])))(
                x, axis=(axis,), keepdims=bool(rng.integers(0, 2))
            )
        if kind == 12:
            return op("softmax")(x, axis=axis)
        if kind == 13:
            return op("layer_norm")(x)
        if kind == 14:
            w = self.input((int(rng.choice(SIZES)), x.shape[-1]), "param")
            return op("linear")(x, w, None, activation=str(rng.choice(["none", "relu", "gelu", "tanh"])))
        if kind == 15:
            return op("matmul")(x, self.input((x.shape[-1], int(rng.choice(SIZES)))))
        if kind == 16:
            return op("matmul")(x, op("transpose")(x, perm=(*range(rank - 2), rank - 1, rank - 2)))
        if kind == 17:
            return op("concat")(x, x, axis=axis)
        if kind == 18:
            return op("where")(op("greater")(x, 0.0), x, op("mul")(x, 0.5))
        indices = self.builder.constant(rng.integers(-9, 9, (3,)).astype(np.int32))
        return op("take")(x, indices, axis=axis)
