"""Variants of operations on every backend: the candidates of specialize-operations and kernel-choice (english: ok).

``OMP_NUM_THREADS=1 python benchmarks/bench_ways.py [backend ...]``: ratios are the operation's own time over the time
of the other form; more than 1 is faster.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from mithril import ops, plugins
from mithril.graph import Builder, Value
from mithril.passes import PassContext
from mithril_passes.operation_forms.kernel_selection import OWN, measured
from mithril_passes.operation_forms.op_variants import variants_of

Write = Callable[[Builder], Value]


def inputs(b: Builder, *shapes: tuple[int, ...]) -> list[Value]:
    return [b.input(f"x{k}", shape) for k, shape in enumerate(shapes)]


def conv(op: str, *shapes: tuple[int, ...], kernel: int, **more: Any) -> Write:
    pad = ((kernel // 2, kernel // 2),) * 2
    settings = {"stride": (1, 1), "padding": pad, "dilation": (1, 1), "groups": 1, **more}
    return lambda b: getattr(ops, op)(*inputs(b, *shapes), **settings)


IMAGE, POINT, TAPS = (4, 64, 28, 28), (64, 64, 1, 1), (64, 1, 3, 3)
CASES: dict[str, Write] = {
    "linear, 1 row, 512 to 512": lambda b: ops.linear(*inputs(b, (1, 512), (512, 512), (512,))),
    "linear, 32 rows, 512 to 512": lambda b: ops.linear(*inputs(b, (32, 512), (512, 512), (512,))),
    "linear, [4, 64] rows, 384 to 1536": lambda b: ops.linear(*inputs(b, (4, 64, 384), (1536, 384), (1536,))),
    "matmul, [256, 2] by [2, 256]": lambda b: ops.matmul(*inputs(b, (256, 2), (2, 256))),
    "attention [2, 8, 128, 64]": lambda b: ops.attention(*inputs(b, *[(2, 8, 128, 64)] * 3)),
    "softmax [512, 512]": lambda b: ops.softmax(*inputs(b, (512, 512)), axis=-1),
    "layer norm [512, 512]": lambda b: ops.layer_norm(*inputs(b, (512, 512), (512,), (512,))),
    "rms norm [512, 512]": lambda b: ops.rms_norm(*inputs(b, (512, 512), (512,))),
    "gelu [512, 512]": lambda b: ops.gelu(*inputs(b, (512, 512))),
    "conv 1x1, 64 to 64, 28x28": conv("conv", IMAGE, POINT, kernel=1),
    "  its image's gradient": conv("conv_input_grad", IMAGE, POINT, kernel=1, shape=IMAGE),
    "  its weight's gradient": conv("conv_weight_grad", IMAGE, IMAGE, kernel=1, shape=POINT),
    "conv 3x3 by channel, 64, 28x28": conv("conv", IMAGE, TAPS, kernel=3, groups=64),
    "  its image's gradient ": conv("conv_input_grad", IMAGE, TAPS, kernel=3, groups=64, shape=IMAGE),
    "  its weight's gradient ": conv("conv_weight_grad", IMAGE, IMAGE, kernel=3, groups=64, shape=TAPS),
}


def main(names: list[str]) -> None:
    for name in names or sorted(plugins.backends()):
        backend = plugins.backend_class(name)()
        print(name)
        for case, write in CASES.items():
            with Builder() as b:
                y = write(b)
            node = b.build({"y": y}).nodes[-1]
            times = measured(node, variants_of(node), backend, PassContext(backend=backend))
            text = ", ".join(f"{way} {times[OWN] / t:.2f}" for way, t in times.items() if way != OWN)
            print(f"  {case:<36}{times[OWN] * 1e6:>10.0f} µs   {text}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
