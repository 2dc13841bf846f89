"""Single operators of the C backend against torch, on one thread: the times of torch over those of mithril. Above 1
is faster.

``python benchmarks/bench_c_operators.py [functions] [shapes] [NAME ...]``: processor time, the best of interleaved
rounds.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

for variable in ("OMP_NUM_THREADS", "TVM_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as nn  # noqa: E402
from interleaved import interleaved  # noqa: E402

import mithril as ml  # noqa: E402
from mithril import ops  # noqa: E402
from mithril.models import IOKey, Model  # noqa: E402

Case = tuple[Callable[..., Any], Callable[..., Any], tuple[np.ndarray[Any, Any], ...]]
RNG = np.random.default_rng(0)
COUNT = 100_000
UNIT, WIDE, POSITIVE = RNG.uniform(-1, 1, COUNT), RNG.uniform(-9, 9, COUNT), RNG.uniform(0.01, 9, COUNT)
ONE = {
    "sin": WIDE, "cos": WIDE, "tan": WIDE, "asin": UNIT, "acos": UNIT, "atan": WIDE, "sinh": WIDE, "cosh": WIDE,
    "tanh": WIDE, "asinh": WIDE, "acosh": POSITIVE + 1, "atanh": UNIT, "exp": WIDE, "expm1": WIDE, "log": POSITIVE,
    "log1p": POSITIVE, "erf": WIDE, "erfinv": UNIT,
}  # fmt: skip
TWO: dict[str, tuple[Any, Any, tuple[Any, Any]]] = {
    "pow": (ops.pow, torch.pow, (POSITIVE, WIDE)),
    "atan2": (ops.atan2, torch.atan2, (WIDE, UNIT)),
    "mod": (ops.mod, torch.remainder, (WIDE, POSITIVE)),
    "floordiv": (ops.floordiv, torch.floor_divide, (WIDE, POSITIVE)),
}


def functions() -> dict[str, Case]:
    """Elementary functions of 100,000 numbers, random numbers and a loss."""
    cases: dict[str, Case] = {}
    for kind in ("float32", "float64"):
        for name, x in ONE.items():
            cases[f"{name} {kind}"] = (getattr(ops, name), getattr(torch, name), (x.astype(kind),))
        for name, (mithril_function, torch_function, arrays) in TWO.items():
            cases[f"{name} {kind}"] = (mithril_function, torch_function, tuple(x.astype(kind) for x in arrays))
    key = np.array([0, 1], np.uint32)
    cases["normal"] = (lambda k: ops.normal(k, shape=(COUNT,)), lambda _: torch.randn(COUNT), (key,))
    cases["uniform"] = (lambda k: ops.uniform(k, shape=(COUNT,)), lambda _: torch.rand(COUNT), (key,))
    p, y = (POSITIVE / 10).astype("f4"), (UNIT > 0).astype("f4")
    cases["binary_cross_entropy"] = (ops.binary_cross_entropy, nn.binary_cross_entropy, (p, y))
    return cases


def random(*shape: int) -> np.ndarray[Any, Any]:
    return RNG.standard_normal(shape).astype(np.float32)


def shapes() -> dict[str, Case]:
    """Operators whose shapes or steps are unusual."""
    image, table, ids = random(1, 3, 240, 320), random(1000, 64), RNG.integers(0, 1000, (256, 20)).astype(np.int32)
    rows, places = random(20_000, 32), RNG.integers(0, 500, 20_000).astype(np.int32)
    small, rows_17x7 = random(8, 32, 56, 56), random(64, 32, 17, 7)

    def resized(size: tuple[int, int], mode: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
        def torch_function(x: Any) -> Any:
            return nn.interpolate(x, size, mode=mode, align_corners=None if mode == "nearest" else False)

        return lambda x: ops.resize(x, size=size, mode=mode), torch_function

    def summed(axes: tuple[int, ...]) -> tuple[Callable[..., Any], Callable[..., Any]]:
        return lambda x: ops.sum(x, axis=axes), lambda x: torch.sum(x, axes)

    def padded(mode: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
        return lambda x: ops.pad(
            x, widths=((0, 0), (0, 0), (2, 2), (2, 2)), mode={"replicate": "edge"}.get(mode, mode)
        ), lambda x: nn.pad(x, (2, 2, 2, 2), mode)

    return {
        "resize 240x320 to 60x80": (*resized((60, 80), "bilinear"), (image,)),
        "product 1x5x100000": (ops.matmul, torch.matmul, (random(1, 100_000), random(100_000, 5))),
        "product 8x8x100000": (ops.matmul, torch.matmul, (random(8, 100_000), random(100_000, 8))),
        "product 64x10x784": (ops.matmul, torch.matmul, (random(64, 784), random(784, 10))),
        "gram 20000x12": (lambda x: ops.matmul(x.T, x), lambda x: x.T @ x, (random(20_000, 12),)),
        "sum axes 123": (*summed((1, 2, 3)), (rows_17x7,)),
        "sum axes 023": (*summed((0, 2, 3)), (rows_17x7,)),
        "sum axes 23": (*summed((2, 3)), (rows_17x7,)),
        "pool average 7": (
            lambda x: ops.avg_pool(x, kernel=(7, 7), stride=(7, 7)),
            lambda x: nn.avg_pool2d(x, 7),
            (random(1, 512, 7, 7),),
        ),
        "pad replicate": (*padded("replicate"), (small,)),
        "pad reflect": (*padded("reflect"), (small,)),
        "slice with steps": (lambda x: x[:, :, ::2, ::2], lambda x: x[:, :, ::2, ::2].contiguous(), (small,)),
        "gather-sum": (
            lambda i, w: ops.sum(ops.take(w, i, axis=0), axis=1),
            lambda i, w: nn.embedding_bag(i, w, mode="sum"),
            (ids, table),
        ),
        "scatter-add": (
            lambda x, i: ops.scatter_nd_add(np.zeros((500, 32), np.float32), i, x),
            lambda x, i: torch.zeros(500, 32).index_add_(0, i[:, 0], x),
            (rows, places[:, None]),
        ),
        "cumsum 0": (lambda x: ops.cumsum(x, axis=0), lambda x: torch.cumsum(x, 0), (random(1000, 1000),)),
        "cumsum 1": (lambda x: ops.cumsum(x, axis=1), lambda x: torch.cumsum(x, 1), (random(1000, 1000),)),
    }


def measured(case: Case) -> tuple[float, float, float]:
    """Return the seconds of the C backend, of torch, and of compiling."""
    function, torch_function, arrays = case
    names = [f"x{k}" for k in range(len(arrays))]
    keys = [IOKey(n, shape=list(a.shape), dtype=str(a.dtype)) for n, a in zip(names, arrays, strict=True)]
    model = Model.create(inputs=keys, outputs={"y": function(*keys)})
    start = time.process_time()
    program = ml.compile(model, ml.CBackend(num_threads=1), inference=True)
    data = dict(zip(names, arrays, strict=True))
    program(data)
    compiling = time.process_time() - start
    tensors = [torch.from_numpy(a) if a.dtype != np.uint32 else None for a in arrays]
    ways = {"c": lambda: program(data), "torch": lambda: torch_function(*tensors)}
    best = interleaved(ways, seconds=0.3, min_rounds=5, clock=time.process_time)
    return best["c"], best["torch"], compiling


def main(arguments: list[str]) -> None:
    torch.set_num_threads(1)
    groups = {"functions": functions, "shapes": shapes}
    groups_to_run = [g for g in arguments if g in groups] or list(groups)
    operators = [a for a in arguments if a not in groups]
    print("| operator | C, us | torch, us | times | compiled, s |\n|---|---|---|---|---|")
    for group in groups_to_run:
        for name, case in groups[group]().items():
            if operators and name.split()[0] not in operators:
                continue
            c, reference, compiling = measured(case)
            print(
                f"| {name} | {c * 1e6:.1f} | {reference * 1e6:.1f} | {reference / c:.2f} | {compiling:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main(sys.argv[1:])
