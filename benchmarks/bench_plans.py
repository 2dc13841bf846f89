"""Plans against the TPU compiler for families of models that their rules were not derived from.

``python benchmarks/bench_plans.py [name ...]``: nothing runs on a TPU and none is needed, only its compiler (libtpu).
For each model and mesh one line: the compiler's peak memory per device, the plan's and its upper bound, their ratio to
the compiler's; exchanged bytes of both; operations as a ratio.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from bert import bert
from gpt import gpt
from lstm_lm import lstm_lm
from vit import vit

import mithril as ml
import mithril_tpu
from mithril.models import (
    Conv2d,
    Embedding,
    Gelu,
    IOKey,
    LayerNorm,
    Linear,
    MaxPool2d,
    Model,
    Relu,
    RMSNorm,
)


def perceptron(width: int, layers: int) -> Model:
    x = IOKey("input")
    for k in range(layers):
        x = Relu()(Linear(width, name=f"layer{k}")(x))
    return Model.create(outputs={"output": x})


def autoencoder(width: int) -> Model:
    """Return a perceptron whose layers become narrower, then wider."""
    x = IOKey("input")
    for k, n in enumerate((width // 2, width // 8, 64, width // 8, width // 2)):
        x = Gelu()(Linear(n, name=f"layer{k}")(x))
    return Model.create(outputs={"output": Linear(width, name="last")(x)})


def convnext(width: int, blocks: int) -> Model:
    """Return blocks of a depthwise 7 x 7 convolution and a perceptron over the channels."""
    x = Conv2d(width, kernel_size=4, stride=4, name="stem")(IOKey("input"))
    for k in range(blocks):
        h = Conv2d(width, kernel_size=7, padding=3, groups=width, name=f"b{k}.depthwise")(x)
        h = LayerNorm(width, name=f"b{k}.norm")(h.transpose((0, 2, 3, 1)))
        h = Linear(width, name=f"b{k}.down")(Gelu()(Linear(4 * width, name=f"b{k}.up")(h)))
        x = x + h.transpose((0, 3, 1, 2))
    return Model.create(outputs={"output": Linear(1000, name="head")(x.mean((2, 3)))})


def vgg(width: int) -> Model:
    """Return convolutions with pools and without normalization."""
    x = IOKey("input")
    for k, n in enumerate((1, 2, 4)):
        x = Relu()(Conv2d(n * width, kernel_size=3, padding=1, name=f"a{k}")(x))
        x = MaxPool2d(2)(Relu()(Conv2d(n * width, kernel_size=3, padding=1, name=f"b{k}")(x)))
    return Model.create(outputs={"output": Linear(1000, name="head")(x.mean((2, 3)))})


def mixer(features: int, tokens: int, blocks: int) -> Model:
    """Return blocks of a perceptron over the tokens and one over the features."""
    x = Linear(features, name="stem")(IOKey("input"))
    for k in range(blocks):
        h = LayerNorm(features, name=f"b{k}.norm1")(x).transpose((0, 2, 1))
        h = Linear(tokens, name=f"b{k}.token2")(Gelu()(Linear(2 * tokens, name=f"b{k}.token1")(h)))
        x = x + h.transpose((0, 2, 1))
        h = LayerNorm(features, name=f"b{k}.norm2")(x)
        x = x + Linear(features, name=f"b{k}.mix2")(Gelu()(Linear(4 * features, name=f"b{k}.mix1")(h)))
    return Model.create(outputs={"output": x})


def gated(vocabulary: int, features: int, blocks: int) -> Model:
    """Return gated perceptrons over an embedding, with root mean square normalization."""
    x = Embedding(vocabulary, features, name="table")(IOKey("input"))
    for k in range(blocks):
        h = RMSNorm(features, name=f"b{k}.norm")(x)
        gate = Linear(3 * features, bias=False, name=f"b{k}.gate")(h)
        up = Linear(3 * features, bias=False, name=f"b{k}.up")(h)
        x = x + Linear(features, bias=False, name=f"b{k}.down")(gate * gate.sigmoid() * up)
    return Model.create(outputs={"output": Linear(vocabulary, bias=False, name="head")(x)})


Mesh = tuple[int, int, bool]  # data, model, fsdp
Case = tuple[Callable[[], Any], dict[str, list[int]], tuple[Mesh, ...]]
ONE, DATA, TENSOR, FSDP, BOTH = (1, 1, False), (8, 1, False), (2, 4, False), (8, 1, True), (2, 4, True)
CASES: dict[str, Case] = {
    "convnext": (lambda: convnext(128, 4), {"input": [32, 3, 128, 128]}, (ONE, DATA)),
    "vgg": (lambda: vgg(64), {"input": [64, 3, 64, 64]}, (ONE, DATA)),
    "mlp 8192": (lambda: perceptron(8192, 4), {"input": [64, 8192]}, (ONE, DATA, TENSOR, FSDP)),
    "mlp 4096": (lambda: perceptron(4096, 6), {"input": [1024, 4096]}, (DATA, TENSOR, BOTH)),
    "autoencoder": (lambda: autoencoder(8192), {"input": [1024, 8192]}, (ONE, DATA, TENSOR)),
    "mixer": (lambda: mixer(512, 196, 4), {"input": [64, 196, 768]}, (ONE, DATA, FSDP)),
    "gated": (lambda: gated(8192, 512, 4), {"input": [16, 512]}, (ONE, DATA, TENSOR, FSDP)),
    "gpt 2048": (
        lambda: gpt(8192, 2048, layers=2, heads=8, features=512),
        {"input": [8, 2048]},
        (ONE, DATA, TENSOR, BOTH),
    ),
    "bert 128": (
        lambda: bert(8192, 128, layers=3, heads=12, features=768),
        {"tokens": [64, 128], "segments": [64, 128], "mask": [64, 128]},
        (ONE, DATA, FSDP),
    ),
    "vit 32": (
        lambda: vit(256, 32, 1000, layers=4, heads=8, features=512),
        {"input": [64, 3, 256, 256]},
        (ONE, DATA, TENSOR),
    ),
    "lstm 1024": (lambda: lstm_lm(8192, 1024), {"input": [64, 32]}, (ONE, DATA)),
}


def sgd(params: dict[str, Any], gradients: dict[str, Any]) -> dict[str, Any]:
    return {name: params[name] - 0.1 * gradients[name] for name in params}


def main() -> None:
    print(
        f"{'':<13}{'mesh':<8}{'':<5}{'peak MiB':>9}{'plan':>6}{'bound':>7}{'MB':>9}{'plan':>7}{'GFLOP':>9}{'plan':>6}"
    )
    for name in sys.argv[1:] or CASES:
        make, shapes, meshes = CASES[name]
        output = "sequence" if "tokens" in shapes else "output"
        plan = ml.plan(make(), "tpu_v5e", shapes=shapes, devices=sorted({d * m for d, m, _ in meshes}), of=output)
        for data, model, fsdp in meshes:
            tpu = {"replicas": data * model, "model_parallelism": model, "effort": 0}
            options = {"parallelism": "fsdp"} if fsdp else {}
            compiled = ml.compile(
                make(), ml.JaxBackend(), target_hardware="tpu_v5e", tpu_options=tpu, shapes=shapes, **options
            )
            analysis = mithril_tpu.training_program(compiled, output, sgd).analysis
            entry = next(e for e in plan if (e.mesh.size("data"), e.mesh.size("model"), e.fsdp) == (data, model, fsdp))
            peak, carried = analysis.memory.peak, sum(c.bytes for c in (analysis.collectives or {}).values())
            print(
                f"{name:<13}{f'{data} x {model}':<8}{'fsdp' if fsdp else '':<5}{peak / 2**20:>9.1f}"
                f"{entry.memory.peak / peak:>6.2f}{entry.memory.interval[1] / peak:>7.2f}{carried / 1e6:>9.1f}"
                f"{entry.work.exchanged / max(carried, 1):>7.2f}{(analysis.flops or 0) / 1e9:>9.1f}"
                f"{entry.work.flops / (analysis.flops or 1):>6.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
