"""Plans against the TPU's own compiler on the example models; compile seconds per topology; growth to 256 devices.

``python benchmarks/bench_tpu.py [model ...]``: nothing runs on a TPU and none is needed, only its compiler (libtpu).
For each model and mesh one line: the compiler's peak memory per device and the plan's; the same for operations and for
bytes to and from memory, as ratios, and for bytes exchanged; and the seconds that plan and compiler took.
``--bfloat16`` compiles in that precision, ``--effort N`` lets the compiler think longer than the least (0),
``--only models`` leaves the topologies out, ``--only topologies`` the models.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from bert import bert
from gpt import gpt
from lstm_lm import lstm_lm
from resnet18 import resnet18
from unet import unet
from vit import vit

import mithril as ml
import mithril_tpu

Case = tuple[Callable[[], Any], dict[str, list[int]], str]
CASES: dict[str, Case] = {
    "gpt": (lambda: gpt(16384, 512, layers=4, heads=8, features=512), {"input": [16, 512]}, "output"),
    "bert": (
        lambda: bert(16384, 512, layers=4, heads=8, features=512),
        {"tokens": [16, 512], "segments": [16, 512], "mask": [16, 512]},
        "sequence",
    ),
    "vit": (lambda: vit(224, 16, 1000, layers=4, heads=8, features=512), {"input": [64, 3, 224, 224]}, "output"),
    "lstm": (lambda: lstm_lm(10000, 512), {"input": [64, 64]}, "output"),
    "resnet18": (resnet18, {"input": [64, 3, 64, 64]}, "output"),
    "unet": (lambda: unet(width=32, depth=3), {"input": [16, 3, 64, 64]}, "output"),
    # Held out: not used to develop the rules of plans.
    "unet 48": (lambda: unet(width=48, depth=2), {"input": [32, 3, 96, 96]}, "output"),
    "vit 8": (lambda: vit(128, 8, 1000, layers=3, heads=6, features=384), {"input": [32, 3, 128, 128]}, "output"),
    "resnet 128": (resnet18, {"input": [32, 3, 128, 128]}, "output"),
    "resnet of 2": (resnet18, {"input": [2, 3, 64, 64]}, "output"),
}
TOPOLOGIES = (
    *(("tpu_v5e", n) for n in (1, 4, 8, 16, 32, 64, 128, 256)),
    *((target, 8) for target in ("tpu_v2", "tpu_v3", "tpu_v4", "tpu_v5p", "tpu_v6e", "tpu_v7x")),
)
MESHES: tuple[tuple[dict[str, int], dict[str, str]], ...] = (
    ({"replicas": 1}, {}),
    ({"replicas": 8}, {}),
    ({"replicas": 8}, {"parallelism": "fsdp"}),
    ({"replicas": 8, "model_parallelism": 4}, {}),
)


def sgd(params: dict[str, Any], gradients: dict[str, Any]) -> dict[str, Any]:
    return {name: params[name] - 0.1 * gradients[name] for name in params}


def compared(name: str, options: dict[str, Any], effort: int) -> Iterator[str]:
    """Print one line per mesh, for a training step."""
    make, shapes, description = CASES[name]
    for mesh, kind in MESHES:
        start = time.perf_counter()
        plan = ml.plan(make(), "tpu_v5e", shapes=shapes, devices=mesh["replicas"], of=description, **options)
        planned = time.perf_counter() - start
        way = next(w for w in plan if w.options == {"tpu_options": mesh, **kind})
        try:
            step = _step(name, "tpu_v5e", {**mesh, "effort": effort}, {**options, **kind})
        except ml.MithrilError as error:
            yield f"{name:<12}{way.mesh!s:<20} {error.what}"
            continue
        a = step.analysis
        carried = sum(c.bytes for c in a.collectives.values())
        yield (
            f"{name:<12}{way.mesh!s:<20}{'fsdp' if way.fsdp else '':<5}"
            f"{a.memory.peak / 2**20:>9.1f}{way.memory.peak / 2**20:>9.1f}{way.memory.peak / a.memory.peak:>6.2f}"
            f"{a.flops or 0:>11.3g}{way.work.flops / (a.flops or 1):>6.2f}"
            f"{way.work.traffic / (a.bytes_accessed or 1):>6.2f}"
            f"{carried / 2**20:>9.1f}{way.work.exchanged / 2**20:>9.1f}"
            f"{planned:>8.2f}{step.seconds['compile']:>9.2f}"
        )


def _step(name: str, target: str, tpu_options: dict[str, Any], options: dict[str, Any]) -> Any:
    make, shapes, description = CASES[name]
    compiled = ml.compile(
        make(), ml.JaxBackend(), target_hardware=target, tpu_options=tpu_options, shapes=shapes, **options
    )
    return mithril_tpu.training_program(compiled, description, sgd)


def topologies() -> Iterator[str]:
    """Compile seconds of a small GPT's forward pass, by generation and number of devices."""
    for target, n in TOPOLOGIES:
        compiled = ml.compile(
            gpt(1024, 128, layers=2, heads=8, features=256),
            ml.JaxBackend(),
            target_hardware=target,
            tpu_options={"replicas": n, "model_parallelism": min(n, 4), "effort": 0},
            shapes={"input": [256, 128]},
        )
        program = mithril_tpu.ahead_of(compiled)
        exchanges = ", ".join(f"{c.count} {kind}" for kind, c in program.analysis.collectives.items()) or "none"
        text = exchanges if program.hlo is not None else "exchanges unknown"
        yield f"{target:<9}{n:>5}{program.seconds['compile']:>8.2f} s  {text}"


def growth() -> Iterator[str]:
    """Seconds of planning all meshes of n devices for one training step."""
    for n in (1, 4, 8, 16, 32, 64, 128, 256):
        start = time.perf_counter()
        plan = ml.plan(
            gpt(1024, 128, layers=4, heads=16, features=256),
            "tpu_v5e",
            shapes={"input": [256, 128]},
            devices=n,
            of="output",
        )
        yield f"{n:>5} devices: {len(plan.entries):>3} meshes in {time.perf_counter() - start:6.2f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(CASES))
    parser.add_argument("--bfloat16", action="store_true")
    parser.add_argument("--effort", type=int, default=0)
    parser.add_argument("--only", choices=("models", "topologies"))
    arguments = parser.parse_args()
    options = {"precision": "bfloat16"} if arguments.bfloat16 else {}
    if arguments.only != "topologies":
        print("training step, per device: peak MiB by compiler and plan, ratio; operations, ratio; ratio of traffic;")
        print("exchanged MiB by compiler and plan; seconds of plan and compiler")
        for name in arguments.models:
            for line in compared(name, options, arguments.effort):
                print(line, flush=True)
    if arguments.only != "models":
        print("\ncompile seconds, small GPT forward, data x 4")
        for line in topologies():
            print(line, flush=True)
        print("\nplanning")
        for line in growth():
            print(line, flush=True)


if __name__ == "__main__":
    main()
