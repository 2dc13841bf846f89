"""Single operators of the C backend against torch, whose convolutions are oneDNN's: processor time on one thread.

``python benchmarks/bench_operators.py functions|shapes|dtypes|convolutions [words of the rows] [--threads 2]``: the
best of interleaved rounds. Numbers of torch are its time over ours: above 1, mithril is faster. ``functions`` are
elementary functions, random numbers and a loss; ``shapes`` are operators whose shapes or steps are unusual; ``dtypes``
are products of other dtypes, also against float32's on the same sizes; ``convolutions`` are convolutions and their
gradients, all of whose operands are arguments as they are in training, those of ResNet-18, and a CNN's training step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import harness
import ml_dtypes
import numpy as np
import torch
import torch.nn.functional as F
from harness import THREADS
from models import RNG, Array, of_operations, random

import mithril as ml
from mithril import ops
from mithril.models import Conv2d, IOKey, Linear, Model, Relu

torch.set_num_threads(THREADS)
Call = Callable[[], Any]
Case = tuple[Callable[..., Any], Callable[..., Any], tuple[Array, ...]]
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
    cases["binary_cross_entropy"] = (ops.binary_cross_entropy, F.binary_cross_entropy, (p, y))
    return cases


def shapes() -> dict[str, Case]:
    """Operators whose shapes or steps are unusual."""
    image, table, ids = random(1, 3, 240, 320), random(1000, 64), RNG.integers(0, 1000, (256, 20)).astype(np.int32)
    rows, places = random(20_000, 32), RNG.integers(0, 500, 20_000).astype(np.int32)
    small, rows_17x7 = random(8, 32, 56, 56), random(64, 32, 17, 7)

    def resized(size: tuple[int, int], mode: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
        def torch_function(x: Any) -> Any:
            return F.interpolate(x, size, mode=mode, align_corners=None if mode == "nearest" else False)

        return lambda x: ops.resize(x, size=size, mode=mode), torch_function

    def summed(axes: tuple[int, ...]) -> tuple[Callable[..., Any], Callable[..., Any]]:
        return lambda x: ops.sum(x, axis=axes), lambda x: torch.sum(x, axes)

    def padded(mode: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
        return lambda x: ops.pad(
            x, widths=((0, 0), (0, 0), (2, 2), (2, 2)), mode={"replicate": "edge"}.get(mode, mode)
        ), lambda x: F.pad(x, (2, 2, 2, 2), mode)

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
            lambda x: F.avg_pool2d(x, 7),
            (random(1, 512, 7, 7),),
        ),
        "pad replicate": (*padded("replicate"), (small,)),
        "pad reflect": (*padded("reflect"), (small,)),
        "slice with steps": (lambda x: x[:, :, ::2, ::2], lambda x: x[:, :, ::2, ::2].contiguous(), (small,)),
        "gather-sum": (
            lambda i, w: ops.sum(ops.take(w, i, axis=0), axis=1),
            lambda i, w: F.embedding_bag(i, w, mode="sum"),
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


def measured(case: Case) -> str:
    """Return the cells of an operator."""
    function, torch_function, arrays = case
    start = time.process_time()
    program, data = of_operations(function, *arrays, num_threads=THREADS)
    program(data)
    compiling = time.process_time() - start
    tensors = [torch.from_numpy(a) if a.dtype != np.uint32 else None for a in arrays]
    ways = {"c": lambda: program(data), "torch": lambda: torch_function(*tensors)}
    best = harness.interleaved(ways, seconds=0.3, min_rounds=5)
    times = " | ".join(f"{best[way] * 1e6:.1f}" for way in ways)
    return f"{times} | {best['torch'] / best['c']:.2f} | {compiling:.2f}"


def print_operators(cases: dict[str, Case], words: list[str]) -> None:
    print("| operator | C, us | torch, us | times | compiled, s |\n|---|---|---|---|---|")
    for name, case in harness.selected(cases, words).items():
        print(f"| {name} | {measured(case)} |", flush=True)


# -- dtypes -----------------------------------------------------------------------------------------------------------
DTYPES = {
    "bfloat16": (ml_dtypes.bfloat16, torch.bfloat16),
    "float16": (np.float16, torch.float16),
    "float64": (np.float64, torch.float64),
    "int32": (np.int32, torch.int32),
    "int8": (np.int8, torch.int8),
}
PRODUCTS = [(512, 512, 512), (32, 512, 784), (4, 1024, 1024), (1, 4096, 4096)]


def times_transposed(x: Any, w: Any) -> Any:
    return ops.matmul(x, ops.transpose(w, perm=(1, 0)))


def scaled(x: Any, q: Any, s: Any) -> Any:
    return times_transposed(x, ops.cast(q, dtype="float32")) * s


def product(name: str, m: int, n: int, k: int) -> str:
    kind, peer = DTYPES[name]
    x, w = (RNG.integers(-9, 10, shape).astype(np.float32) for shape in ((m, k), (n, k)))
    s, small = random(n), w.astype(kind)
    tx, tw = torch.from_numpy(x), torch.from_numpy(w).to(peer)
    exact, inputs = of_operations(times_transposed, x, w, num_threads=THREADS)
    calls: dict[str, Call] = {"float32": lambda: exact.evaluate(inputs)}
    if name == "int8":
        program, data = of_operations(scaled, x, small, s, num_threads=THREADS)
        calls["torch"] = lambda: (tx @ tw.float().t()) * torch.from_numpy(s)
    else:
        program, data = of_operations(times_transposed, x.astype(kind), small, num_threads=THREADS)
        tx = tx.to(peer)
        calls["torch"] = lambda: tx @ tw.t()
    seconds = harness.interleaved({"ours": lambda: program.evaluate(data), **calls}, 1.0, min_rounds=5)
    speed, read = 2 * m * n * k / seconds["ours"] / 1e9, small.nbytes / seconds["ours"] / 1e9
    against = harness.ratios(seconds, "ours", "float32", "torch")
    return f"{seconds['ours'] * 1e6:.1f} us, {speed:.0f} GFLOP/s, reads {read:.0f} GB/s; {against}"


def dtypes(words: list[str]) -> None:
    """``int8``: float32 rows times weights of eight bits, whose columns are scaled afterwards, as in exported C."""
    rows = {f"{name} {'x'.join(map(str, sizes))}": (name, *sizes) for name in DTYPES for sizes in PRODUCTS}
    for title, row in harness.selected(rows, words).items():
        print(f"{title}: {product(*row)}", flush=True)


# -- convolutions -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Convolution:
    """One layer: a batch of square (or 1-D, or 3-D) images of edge length ``size``."""

    channels: int
    size: int
    outputs: int
    kernel: int = 3
    stride: int = 1
    batch: int = 1
    groups: int = 1
    rank: int = 2
    transposed: bool = False

    @property
    def attributes(self) -> dict[str, Any]:
        r, pad = self.rank, self.kernel // 2
        return {"stride": (self.stride,) * r, "padding": ((pad, pad),) * r, "dilation": (1,) * r, "groups": self.groups}


RESNET = {  # layer -> how often ResNet-18 has it; sizes are those of images of 224 pixels
    Convolution(3, 224, 64, 7, 2): 1,
    Convolution(64, 56, 64): 4,
    Convolution(64, 56, 128, 3, 2): 1,
    Convolution(64, 56, 128, 1, 2): 1,
    Convolution(128, 28, 128): 3,
    Convolution(128, 28, 256, 3, 2): 1,
    Convolution(128, 28, 256, 1, 2): 1,
    Convolution(256, 14, 256): 3,
    Convolution(256, 14, 512, 3, 2): 1,
    Convolution(256, 14, 512, 1, 2): 1,
    Convolution(512, 7, 512): 3,
}
SINGLE = {
    "depthwise 32 at 112": Convolution(32, 112, 32, groups=32),
    "depthwise 64 at 112, stride 2": Convolution(64, 112, 64, stride=2, groups=64),
    "depthwise 128 at 56": Convolution(128, 56, 128, groups=128),
    "depthwise 256 at 28, stride 2": Convolution(256, 28, 256, stride=2, groups=256),
    "depthwise 512 at 14": Convolution(512, 14, 512, groups=512),
    "groups of 8, 64 at 28": Convolution(64, 28, 64, groups=8),
    "signal 64->64, 5 of 1024": Convolution(64, 1024, 64, 5, rank=1),
    "signal 64->128, 5 of 1024, stride 2": Convolution(64, 1024, 128, 5, 2, rank=1),
    "volume 16->32 at 16": Convolution(16, 16, 32, rank=3),
    "transposed 64->32 at 14, 4, stride 2": Convolution(32, 28, 64, 4, 2, transposed=True),
}


def ours(function: Callable[..., Any], *arrays: Any) -> Call:
    """Compile a function of operations for these operands."""
    compiled, inputs = of_operations(function, *arrays, num_threads=THREADS)
    compiled.bind({})
    return lambda: next(iter(compiled(inputs).values()))


def ways(c: Convolution) -> Iterator[tuple[str, Call, Call]]:
    """Return the convolution and its gradients, by mithril and by torch."""
    how, pad = c.attributes, [c.kernel // 2] * c.rank
    x = random(c.batch, c.channels, *[c.size] * c.rank)
    w = random(c.outputs, c.channels // c.groups, *[c.kernel] * c.rank) / c.kernel**c.rank
    function = (F.conv1d, F.conv2d, F.conv3d)[c.rank - 1]
    tx, tw = torch.from_numpy(x), torch.from_numpy(w)
    result = function(tx, tw, None, c.stride, pad, 1, c.groups)
    tg = torch.randn(result.shape)
    g = tg.numpy()

    def back(which: int) -> Any:
        mask = [k == which for k in range(3)]
        stride, ones, zeros = [c.stride] * c.rank, [1] * c.rank, [0] * c.rank
        call = torch.ops.aten.convolution_backward
        return call(tg, tx, tw, None, stride, pad, ones, False, zeros, c.groups, mask)[which]

    if c.transposed:  # torch's own, which goes back from the cotangent
        transposed = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[c.rank - 1]
        yield (
            "forward",
            ours(lambda g, w: ops.conv_input_grad(g, w, shape=x.shape, **how), g, w),
            lambda: transposed(tg, tw, None, c.stride, pad),
        )
        return
    yield (
        "forward",
        ours(lambda x, w: ops.conv(x, w, **how), x, w),
        lambda: function(tx, tw, None, c.stride, pad, 1, c.groups),
    )
    if c.channels > 3:  # the gradient of an image is rarely needed
        yield "to the image", ours(lambda g, w: ops.conv_input_grad(g, w, shape=x.shape, **how), g, w), lambda: back(0)
    yield "to the kernel", ours(lambda x, g: ops.conv_weight_grad(x, g, shape=w.shape, **how), x, g), lambda: back(1)


def compared(mithril: Call, theirs: Call) -> tuple[float, float]:
    a, b = np.asarray(mithril()), np.asarray(theirs())
    np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4 * float(np.abs(b).max()))
    seconds = harness.interleaved({"mithril": mithril, "torch": theirs}, 0.5, 5)
    return seconds["mithril"], seconds["torch"]


def single(c: Convolution) -> str:
    times = [(name, *compared(mithril, theirs)) for name, mithril, theirs in ways(c)]
    return ", ".join(f"{name} {a * 1e6:.0f} us ({b / a:.2f})" for name, a, b in times)


def of_resnet(size: int, batch: int) -> str:
    total: dict[str, list[float]] = {}
    worst: dict[str, float] = {}
    for layer, times in RESNET.items():
        fields = {**vars(layer), "size": layer.size * size // 224, "batch": batch}
        for name, mithril, theirs in ways(Convolution(**fields)):
            a, b = compared(mithril, theirs)
            mine_all, theirs_all = total.setdefault(name, [0.0, 0.0])
            total[name] = [mine_all + times * a, theirs_all + times * b]
            worst[name] = min(worst.get(name, b / a), b / a)
    return ", ".join(
        f"{name} {a * 1e3:.1f} ms ({b / a:.2f}, worst layer {worst[name]:.2f})" for name, (a, b) in total.items()
    )


LAYERS = ((16, 32, 1), (32, 32, 2), (64, 16, 2), (64, 8, 1))  # channels made, size of the image, stride


def cnn() -> Any:
    """Four convolutions of images of 32 pixels, and a classifier."""
    x = IOKey("input")
    h: Any = x
    channels = 3
    for k, (out_channels, _, stride) in enumerate(LAYERS):
        h = Relu()(Conv2d(channels, out_channels, kernel_size=3, stride=stride, padding=1, name=f"c{k}")(h))
        channels = out_channels
    h = Linear(channels, 10, name="head")(ops.mean(h, axis=(2, 3)))
    return Model.create(inputs=x, outputs={"output": h})


def training(batch: int = 32) -> str:
    x = random(batch, 3, 32, 32)
    y = RNG.integers(0, 10, batch).astype(np.int32)
    trainer = ml.Trainer(cnn(), ml.Adam(1e-3), loss="cross_entropy", backend="c", num_threads=THREADS)
    tensors = {"input": x, "target": y}
    trainer.begin(tensors)

    layers: list[Any] = []
    channels = 3
    for out_channels, _, stride in LAYERS:
        layers += [torch.nn.Conv2d(channels, out_channels, 3, stride, 1), torch.nn.ReLU()]
        channels = out_channels
    model = torch.nn.Sequential(
        *layers, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(channels, 10)
    )
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    tx, ty = torch.from_numpy(x), torch.from_numpy(y).long()

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(tx), ty).backward()
        optimizer.step()

    seconds = harness.interleaved({"mithril": lambda: trainer.step(tensors), "torch": step}, 2.0, 5)
    return f"{seconds['mithril'] * 1e3:.2f} ms ({seconds['torch'] / seconds['mithril']:.2f})"


def convolutions(words: list[str]) -> None:
    rows: dict[str, Callable[[], str]] = {name: lambda c=c: single(c) for name, c in SINGLE.items()}
    for size, batch in ((64, 1), (64, 8), (224, 1), (224, 8)):
        rows[f"convolutions of ResNet-18 at {size}, batch {batch}"] = lambda s=size, b=batch: of_resnet(s, b)
    rows["training step of four convolutions, batch 32"] = training
    print(f"{THREADS} thread(s); in brackets torch's time over ours", flush=True)
    for name, row in harness.selected(rows, words).items():
        with torch.set_grad_enabled(row is training):
            print(f"{name}: {row()}", flush=True)


PARTS: dict[str, Callable[[list[str]], None]] = {
    "functions": lambda words: print_operators(functions(), words),
    "shapes": lambda words: print_operators(shapes(), words),
    "dtypes": dtypes,
    "convolutions": convolutions,
}


def main() -> None:
    part, *words = harness.arguments(__doc__, "PART [WORD]").words or [""]
    with torch.no_grad():
        for name in [part] if part else PARTS:
            PARTS[name](words)


if __name__ == "__main__":
    main()
