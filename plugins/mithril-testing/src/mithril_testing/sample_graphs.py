"""Small input graphs for pass tests, one for each feature of graphs that a pass must handle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np

from mithril.graph import Builder, Dim, Graph, Op, Output, operation as op, result
from mithril.ops import cond, scan
from mithril_testing.cases import Case, differentiable, gradient_graph
from mithril_testing.grown import join_graphs
from mithril_testing.selection import selected


def sample_graphs() -> Iterator[tuple[str, Graph]]:
    """Named graphs: a network, symbolic sizes, constants, repeats, dead code, randomness, control flow."""
    yield "mlp", _mlp()
    yield "symbolic", _symbolic()
    yield "constants", _constants()
    yield "repeats", _repeats()
    yield "image", _image()
    yield "random", _random()
    yield "control", _control()
    yield "handed-through", _pass_through()


@cache
def operation_graphs() -> dict[str, Graph]:
    """Return the first two samples of all operations and their gradients, about twenty operations to a graph.

    The operations are those of ``selected``: a new one is covered as soon as it is declared.
    """
    rows = [op for op in selected(None).values() if op.samples]
    return {f"operations-{k}": _calls(f"operations_{k}", rows[k::GROUPS]) for k in range(GROUPS)}


GROUPS = 10


def _calls(name: str, ops: Sequence[Op]) -> Graph:
    parts = []
    for called in ops:
        for number, sample in enumerate(called.samples[:2]):
            case = Case(called, sample, number)
            graph = case.graph()
            if sample.gradient and differentiable(case):
                graph = gradient_graph(graph)
            parts.append((f"{called.name}{number}", graph))
    return join_graphs(parts, name)


def _mlp() -> Graph:
    with Builder("mlp") as b:
        x = b.input("x", (3, 8))
        h = op("relu")(op("linear")(x, b.param("w1", (16, 8)), b.param("b1", (16,))))
        y = op("softmax")(op("linear")(h, b.param("w2", (4, 16)), b.param("b2", (4,))))
        op("exp")(h)  # unused
    return b.build({"y": y})


def _symbolic() -> Graph:
    with Builder("symbolic") as b:
        x = b.input("x", (Dim("B", 1, 8), Dim("L", 1, 8), 4))
        y = op("layer_norm")(x, b.param("scale", (4,)), b.param("bias", (4,)))
        z = op("reshape")(y, shape=(x.shape[0] * x.shape[1], 4))
        average = op("mean")(y, axis=-1)
    return b.build({"z": z, "average": average})


def _constants() -> Graph:
    with Builder("constants") as b:
        x = b.input("x", (2, 3))
        table = b.constant(np.arange(6, dtype=np.float32).reshape(2, 3))
        half = op("sqrt")(b.constant(0.25, "float32"))
        y = x * 1.0 + op("exp")(table) * half + 0.0
        transposed = op("transpose")(table)
    return b.build({"y": y, "turned": transposed})


def _repeats() -> Graph:
    with Builder("repeats") as b:
        x, w = b.input("x", (3, 4)), b.param("w", (4, 4))
        duplicate = b.param("same", (4, 4))
        a, c = op("tanh")(x @ w), op("tanh")(x @ w)
        y = a + c + op("tanh")(x @ duplicate)
    return b.build({"y": y, "a": a, "c": c})


def _image() -> Graph:
    with Builder("image") as b:
        x = b.input("x", (1, 3, 6, 6))
        y = op("conv")(x, b.param("w", (4, 3, 3, 3)), padding=((1, 1), (1, 1)))
        statistics = [b.param(n, (4,)) for n in ("scale", "bias", "mean")]
        y = op("batch_norm")(y, *statistics, op("square")(b.param("spread", (4,))) + 1.0)
        y = op("max_pool")(op("relu")(y), kernel=(2, 2), stride=(2, 2))
    return b.build({"y": y})


def _random() -> Graph:
    with Builder("random") as b:
        x, key = b.input("x", (4, 4)), b.input("key", (2,), "uint32", "state")
        first, second = op("fold_in")(key, 1), op("fold_in")(key, 2)
        y = op("dropout")(x, first, p=0.5) + op("dropout")(x, second, p=0.5)
    return b.build((Output(y, "y"), result("state", "key", second)))


def _control() -> Graph:
    with Builder("control") as b:
        x, flag = b.input("x", (3,)), b.input("flag", (), "bool")
        w = b.param("w", (3,))
        y = cond(flag, lambda v: v * w + 1.0, lambda v: v - w, x)
        last, steps = scan(lambda c, s: (c + s * w, c), y, b.input("steps", (4, 3)))
    return b.build({"y": last, "steps_out": steps})


def _pass_through() -> Graph:
    with Builder("through") as b:
        x = b.input("x", (2,))
        y = x + 0.0
    return b.build({"x_again": x, "y": y, "y_again": y})
