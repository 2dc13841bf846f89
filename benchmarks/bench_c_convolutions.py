"""The C backend's convolutions and their gradients against torch's, which are oneDNN's; a CNN's training step.

``python benchmarks/bench_c_convolutions.py [words of rows] [--threads 2] [--wall]``: CPU time (with ``--wall``
or several threads, wall time), the best of many interleaved rounds; torch's over ours: above 1, mithril is faster.
All operands are arguments of the call, as they are in training.
"""

from __future__ import annotations

import os
import sys

os.environ["OMP_NUM_THREADS"] = sys.argv[sys.argv.index("--threads") + 1] if "--threads" in sys.argv else "1"
os.environ["OPENBLAS_NUM_THREADS"] = os.environ["TVM_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"]

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from interleaved import interleaved

import mithril as ml
from mithril import ops
from mithril.models import Conv2d, IOKey, Linear, Model, Relu

THREADS = int(os.environ["OMP_NUM_THREADS"])
torch.set_num_threads(THREADS)
RNG = np.random.default_rng(0)
CLOCK = time.perf_counter if "--wall" in sys.argv or THREADS > 1 else time.process_time
SECONDS = 0.5
Call = Callable[[], Any]
Times = dict[str, float]


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


def random(shape: tuple[int, ...]) -> Any:
    return RNG.standard_normal(shape).astype(np.float32)


def ours(function: Callable[..., Any], *arrays: Any) -> Call:
    """Compile a function of operations for these operands."""
    names = [f"x{k}" for k in range(len(arrays))]
    keys = [IOKey(n) for n in names]
    model = Model.create(inputs=keys, outputs=function(*keys))
    shapes = {n: list(a.shape) for n, a in zip(names, arrays, strict=True)}
    compiled = ml.compile(model, "c", shapes=shapes, num_threads=THREADS, inference=True)
    inputs = dict(zip(names, arrays, strict=True))
    compiled.bind({})
    return lambda: next(iter(compiled(inputs).values()))


def ways(c: Convolution) -> Iterator[tuple[str, Call, Call]]:
    """Return the convolution and its gradients, by mithril and by torch."""
    how, pad = c.attributes, [c.kernel // 2] * c.rank
    x = random((c.batch, c.channels, *[c.size] * c.rank))
    w = random((c.outputs, c.channels // c.groups, *[c.kernel] * c.rank)) / c.kernel**c.rank
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


def measured(mithril: Call, theirs: Call) -> tuple[float, float]:
    a, b = np.asarray(mithril()), np.asarray(theirs())
    np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4 * float(np.abs(b).max()))
    seconds = interleaved({"mithril": mithril, "torch": theirs}, SECONDS, 5, CLOCK)
    return seconds["mithril"], seconds["torch"]


def single() -> Iterator[tuple[str, Callable[[], str]]]:
    def row(c: Convolution) -> str:
        parts = []
        for name, mithril, theirs in ways(c):
            a, b = measured(mithril, theirs)
            parts.append(f"{name} {a * 1e6:.0f} us ({b / a:.2f})")
        return ", ".join(parts)

    for name, c in SINGLE.items():
        yield name, lambda c=c: row(c)  # type: ignore[misc]


def resnets() -> Iterator[tuple[str, Callable[[], str]]]:
    def row(size: int, batch: int) -> str:
        total: dict[str, list[float]] = {}
        worst: dict[str, float] = {}
        for layer, times in RESNET.items():
            fields = {**vars(layer), "size": layer.size * size // 224, "batch": batch}
            for name, mithril, theirs in ways(Convolution(**fields)):
                a, b = measured(mithril, theirs)
                mine_all, theirs_all = total.setdefault(name, [0.0, 0.0])
                total[name] = [mine_all + times * a, theirs_all + times * b]
                worst[name] = min(worst.get(name, b / a), b / a)
        return ", ".join(
            f"{name} {a * 1e3:.1f} ms ({b / a:.2f}, worst layer {worst[name]:.2f})" for name, (a, b) in total.items()
        )

    for size, batch in ((64, 1), (64, 8), (224, 1), (224, 8)):
        yield f"convolutions of ResNet-18 at {size}, batch {batch}", lambda s=size, b=batch: row(s, b)  # type: ignore[misc]


# -- training ---------------------------------------------------------------------------------------------------------
SIZES = ((16, 32, 1), (32, 32, 2), (64, 16, 2), (64, 8, 1))  # channels made, size of the image, stride


def cnn() -> Any:
    """Four convolutions of images of 32 pixels, and a classifier."""
    x = IOKey("input")
    h: Any = x
    channels = 3
    for k, (out_channels, _, stride) in enumerate(SIZES):
        h = Relu()(Conv2d(channels, out_channels, kernel_size=3, stride=stride, padding=1, name=f"c{k}")(h))
        channels = out_channels
    h = Linear(channels, 10, name="head")(ops.mean(h, axis=(2, 3)))
    return Model.create(inputs=x, outputs={"output": h})


def training(batch: int = 32) -> str:
    x = random((batch, 3, 32, 32))
    y = RNG.integers(0, 10, batch).astype(np.int32)
    trainer = ml.Trainer(cnn(), ml.Adam(1e-3), loss="cross_entropy", backend="c", num_threads=THREADS)
    tensors = {"input": x, "target": y}
    trainer.begin(tensors)

    layers: list[Any] = []
    channels = 3
    for out_channels, _, stride in SIZES:
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

    seconds = interleaved({"mithril": lambda: trainer.step(tensors), "torch": step}, 4 * SECONDS, 5, CLOCK)
    return f"{seconds['mithril'] * 1e3:.2f} ms ({seconds['torch'] / seconds['mithril']:.2f})"


def main() -> None:
    names = [w for k, w in enumerate(sys.argv[1:]) if not w.startswith("--") and sys.argv[k] != "--threads"]
    clock = "processor time" if CLOCK is time.process_time else "time"
    print(f"{THREADS} thread(s), {clock}; in brackets torch's over ours", flush=True)
    rows = [*single(), *resnets(), ("training step of four convolutions, batch 32", training)]
    with torch.no_grad():
        for name, row in rows:
            if not names or any(w in name for w in names):
                with torch.set_grad_enabled(row is training):
                    print(f"{name}: {row()}", flush=True)


if __name__ == "__main__":
    main()
