"""Plans against the TPU's compiler, and figures of compiled programs: nothing runs on a TPU, and none is needed.

``python benchmarks/bench_tpu.py [PART [name ...]]`` compiles training steps by libtpu. ``examples``: the models of
``examples/``, one line for each mesh: peak memory per device by the compiler and by the plan; operations and bytes to
and from memory, as ratios, and bytes exchanged; the seconds that plan and compiler took. ``families``: the same for
families of models that the rules of plans were not derived from, with the plan's upper bound; ratios are plan over
compiler. ``fsdp``: one line without fsdp, one with it, and one with ``fsdp_reshard=False``. ``constraints``: fully
sharded steps with and without the sharding constraints of the program. ``topologies`` and ``growth``: compile seconds
by number of devices, and seconds of planning. ``--bfloat16`` compiles examples in that precision, ``--effort N`` lets
the compiler think longer than the least (0).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import harness
import tpu_models as m
from bert import bert
from gpt import gpt
from lstm_lm import lstm_lm
from resnet18 import resnet18
from unet import unet
from vit import vit

import mithril as ml
import mithril_tpu
from mithril_tpu import backend as tpu_backend

Shapes = dict[str, list[int]]
Example = tuple[Callable[[], Any], Shapes, str]
EXAMPLES: dict[str, Example] = {
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


Mesh = tuple[int, int, bool]  # data, model, fsdp
Case = tuple[Callable[[], Any], dict[str, list[int]], tuple[Mesh, ...]]
ONE, DATA, TENSOR, FSDP, BOTH = (1, 1, False), (8, 1, False), (2, 4, False), (8, 1, True), (2, 4, True)
CASES: dict[str, Case] = {
    "convnext": (lambda: m.convnext(128, 4), {"input": [32, 3, 128, 128]}, (ONE, DATA)),
    "vgg": (lambda: m.vgg(64), {"input": [64, 3, 64, 64]}, (ONE, DATA)),
    "mlp 8192": (lambda: m.perceptron(8192, 4), {"input": [64, 8192]}, (ONE, DATA, TENSOR, FSDP)),
    "mlp 4096": (lambda: m.perceptron(4096, 6), {"input": [1024, 4096]}, (DATA, TENSOR, BOTH)),
    "autoencoder": (lambda: m.autoencoder(8192), {"input": [1024, 8192]}, (ONE, DATA, TENSOR)),
    "mixer": (lambda: m.mixer(512, 196, 4), {"input": [64, 196, 768]}, (ONE, DATA, FSDP)),
    "gated": (lambda: m.gated(8192, 512, 4), {"input": [16, 512]}, (ONE, DATA, TENSOR, FSDP)),
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
# Models that were written before they were compiled; they led to rules on sines, joined values and gathers later.
UNSEEN: dict[str, Case] = {
    "unet": (lambda: m.unet(64), {"input": [32, 3, 128, 128]}, (ONE, DATA)),
    "mobile": (lambda: m.mobile(32, 4), {"input": [64, 3, 128, 128]}, (ONE, DATA)),
    "sound": (lambda: m.sound(128, 6), {"input": [32, 16, 2048]}, (ONE, DATA)),
    "crossed": (lambda: m.crossed(64, 32, 1024), {"input": [8192, 2048]}, (ONE, DATA)),
    "waves": (lambda: m.waves(1024, 6), {"input": [16384, 2]}, (ONE, DATA)),
    "dense": (lambda: m.dense(32, 6), {"input": [64, 3, 64, 64]}, (ONE, DATA)),
    "recurrent": (lambda: m.recurrent(8192, 1024), {"input": [64, 64]}, (ONE, DATA)),
    "highway": (lambda: m.highway(2048, 6), {"input": [4096, 2048]}, (ONE, DATA, TENSOR)),
    "excited": (lambda: m.excited(64, 4), {"input": [64, 3, 64, 64]}, (ONE, DATA)),
    "tower": (lambda: m.tower(2048, 6), {"input": [2048, 512]}, (ONE, DATA, FSDP, BOTH)),
}
# Models that were written after the rules that the ones above led to.
LATER: dict[str, Case] = {
    "positions": (lambda: m.positions(64, 4), {"input": [64, 3, 48, 48]}, (ONE, DATA)),
    "shuffled": (lambda: m.shuffled(64, 4), {"input": [64, 3, 96, 96]}, (ONE, DATA)),
    "factorized": (lambda: m.factorized(32, 64, 3), {"input": [4096, 32]}, (ONE, DATA, TENSOR)),
    "normalized": (lambda: m.normalized(2048, 6), {"input": [4096, 512]}, (ONE, DATA, TENSOR, FSDP)),
    "experts": (lambda: m.experts(1024, 4, 3), {"input": [4096, 256]}, (ONE, DATA, FSDP)),
    "wavelets": (lambda: m.wavelets(64, 4), {"input": [64, 8, 2048]}, (ONE, DATA)),
}


ALL = {**CASES, **UNSEEN, **LATER}
SMALL: dict[str, tuple[Callable[[], Any], Shapes]] = {
    "gpt 256": (lambda: gpt(4096, 256, layers=2, heads=8, features=512), {"input": [16, 256]}),
    "mlp 1024": (lambda: m.perceptron(1024, 6), {"input": [512, 1024]}),
}
SHARDED = (
    ("gpt 256", "tpu_v5p", ((4, 4), (16, 1))),
    ("gpt 256", "tpu_v5e", ((4, 2), (8, 1))),
    ("gpt 2048", "tpu_v5e", ((4, 2), (8, 1))),
    ("mlp 8192", "tpu_v5e", ((2, 4), (8, 1))),
    ("mlp 1024", "tpu_v5e", ((4, 2), (8, 1))),
)
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "fsdp": {"parallelism": "fsdp"},
    "once": {"parallelism": "fsdp", "fsdp_reshard": False},
}
CONSTRAINED = (
    ("gpt 256", 4, 2),
    ("gpt 256", 8, 1),
    ("gpt 2048", 4, 2),
    ("gpt 2048", 8, 1),
    ("bert 128", 4, 2),
    ("vit 32", 4, 2),
    ("mixer", 4, 2),
    ("gated", 4, 2),
    ("mlp 8192", 2, 4),
    ("mlp 1024", 4, 2),
    ("vgg", 8, 1),
)


def model_of(name: str) -> tuple[Callable[[], Any], Shapes, str]:
    """Return a model, the shapes of its inputs, and the output that a step derives."""
    if name in EXAMPLES:
        return EXAMPLES[name]
    make, shapes = (SMALL.get(name) or ALL[name])[:2]
    return make, shapes, "sequence" if "tokens" in shapes else "output"


def sgd(params: dict[str, Any], gradients: dict[str, Any]) -> dict[str, Any]:
    return {name: params[name] - 0.1 * gradients[name] for name in params}


def step(name: str, target: str, replicas: int, parts: int, effort: int = 0, **options: Any) -> Any:
    """Compile a training step in which ``parts`` devices share the parameters."""
    make, shapes, output = model_of(name)
    tpu = {"replicas": replicas, "model_parallelism": parts, "effort": effort}
    compiled = ml.compile(make(), ml.JaxBackend(), target_hardware=target, tpu_options=tpu, shapes=shapes, **options)
    return mithril_tpu.training_program(compiled, output, sgd)


def exchanged(analysis: Any) -> int:
    return sum(c.bytes for c in (analysis.collectives or {}).values())


def examples(settings: Any, words: list[str]) -> None:
    options = {"precision": "bfloat16"} if settings.bfloat16 else {}
    print("training step, per device: peak MiB by compiler and plan, ratio; operations, ratio; ratio of traffic;")
    print("exchanged MiB by compiler and plan; seconds of plan and compiler")
    for name in harness.selected(EXAMPLES, words):
        make, shapes, output = model_of(name)
        for mesh, kind in MESHES:
            start = time.perf_counter()
            plan = ml.plan(make(), "tpu_v5e", shapes=shapes, devices=mesh["replicas"], of=output, **options)
            planned = time.perf_counter() - start
            way = next(w for w in plan if w.options == {"tpu_options": mesh, **kind})
            try:
                parts = mesh.get("model_parallelism", 1)
                program = step(name, "tpu_v5e", mesh["replicas"], parts, settings.effort, **options, **kind)
            except ml.MithrilError as error:
                print(f"{name:<12}{way.mesh!s:<20} {error.what}", flush=True)
                continue
            a = program.analysis
            print(
                f"{name:<12}{way.mesh!s:<20}{'fsdp' if way.fsdp else '':<5}"
                f"{a.memory.peak / 2**20:>9.1f}{way.memory.peak / 2**20:>9.1f}{way.memory.peak / a.memory.peak:>6.2f}"
                f"{a.flops or 0:>11.3g}{way.work.flops / (a.flops or 1):>6.2f}"
                f"{way.work.traffic / (a.bytes_accessed or 1):>6.2f}"
                f"{exchanged(a) / 2**20:>9.1f}{way.work.exchanged / 2**20:>9.1f}"
                f"{planned:>8.2f}{program.seconds['compile']:>9.2f}",
                flush=True,
            )


def plan_cells(a: Any, entry: Any, has_bound: bool) -> str:
    """Return memory, exchanged bytes and operations by the compiler, with the ratios of a plan if there is one."""
    cells = [(a.memory.peak / 2**20, ""), (exchanged(a) / 1e6, ""), ((a.flops or 0) / 1e9, "")]
    if entry is not None:
        peak = f"{entry.memory.peak / a.memory.peak:.2f}"
        if has_bound:
            peak += f"{entry.memory.interval[1] / a.memory.peak:>7.2f}"
        ratios = peak, entry.work.exchanged / max(exchanged(a), 1), entry.work.flops / (a.flops or 1)
        cells = [(x, r if isinstance(r, str) else f"{r:.2f}") for (x, _), r in zip(cells, ratios, strict=True)]
    return "".join(f"{x:>9.1f}{r:>{13 if has_bound and k == 0 else 6}}" for k, (x, r) in enumerate(cells))


def families(settings: Any, words: list[str]) -> None:
    print(
        f"{'':<13}{'mesh':<8}{'':<5}{'peak MiB':>9}{'plan':>6}{'bound':>7}{'MB':>9}{'plan':>6}{'GFLOP':>9}{'plan':>6}"
    )
    for name, (make, shapes, meshes) in harness.selected(ALL, words).items():
        devices = sorted({d * m for d, m, _ in meshes})
        plan = ml.plan(make(), "tpu_v5e", shapes=shapes, devices=devices, of=model_of(name)[2])
        for data, model, fsdp in meshes:
            a = step(name, "tpu_v5e", data * model, model, **(WAYS["fsdp"] if fsdp else {})).analysis
            entry = next(e for e in plan if (e.mesh.size("data"), e.mesh.size("model"), e.fsdp) == (data, model, fsdp))
            title = f"{name:<13}{f'{data} x {model}':<8}{'fsdp' if fsdp else '':<5}"
            print(title + plan_cells(a, entry, has_bound=True), flush=True)


def sharded(settings: Any, words: list[str]) -> None:
    print(f"{'':<10}{'':<9}{'mesh':<6}{'':<7}{'peak MiB':>9}{'plan':>6}{'MB':>9}{'plan':>6}{'GFLOP':>9}{'plan':>6}")
    for name, target, meshes in SHARDED:
        if words and name not in words:
            continue
        make, shapes, output = model_of(name)
        plan = ml.plan(make(), target, shapes=shapes, devices=sorted({d * m for d, m in meshes}), of=output)
        for data, model in meshes:
            for way, options in WAYS.items():
                a = step(name, target, data * model, model, **options).analysis
                axes = {"data": data, "model": model}
                entries = (w for w in plan if w.mesh.axes == axes and w.fsdp == bool(options) and way != "once")
                title = f"{name:<10}{target:<9}{f'{data}x{model}':<6}{way:<7}"
                print(title + plan_cells(a, next(entries, None), has_bound=False), flush=True)


def constraints(settings: Any, words: list[str]) -> None:
    constrained = tpu_backend.constrained
    print(f"{'':<10}{'mesh':<7}{'MiB':>8}{'without':>9}{'':>6}{'MB':>9}{'without':>9}")
    for name, data, model in CONSTRAINED:
        if words and name not in words:
            continue
        figures = []
        for pass_ in (constrained, lambda graph, *_, **__: graph):
            tpu_backend.constrained = pass_
            try:
                a = step(name, "tpu_v5e", data * model, model, **WAYS["fsdp"]).analysis
            finally:
                tpu_backend.constrained = constrained
            figures.append((a.memory.peak / 2**20, exchanged(a) / 1e6))
        (peak, carried), (free_peak, free_carried) = figures
        print(
            f"{name:<10}{f'{data} x {model}':<7}{peak:>8.1f}{free_peak:>9.1f}{peak / free_peak:>6.2f}"
            f"{carried:>9.1f}{free_carried:>9.1f}{carried / max(free_carried, 1e-3):>6.2f}",
            flush=True,
        )


def topologies(settings: Any, words: list[str]) -> None:
    """Compile a small GPT's forward pass by generation and number of devices."""
    print("compile seconds, small GPT forward, data x 4")
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
        print(f"{target:<9}{n:>5}{program.seconds['compile']:>8.2f} s  {text}", flush=True)


def growth(settings: Any, words: list[str]) -> None:
    """Plan all meshes of n devices for one training step."""
    print("planning")
    for n in (1, 4, 8, 16, 32, 64, 128, 256):
        start = time.perf_counter()
        model = gpt(1024, 128, layers=4, heads=16, features=256)
        plan = ml.plan(model, "tpu_v5e", shapes={"input": [256, 128]}, devices=n, of="output")
        seconds = time.perf_counter() - start
        print(f"{n:>5} devices: {len(plan.entries):>3} meshes in {seconds:6.2f} s", flush=True)


PARTS: dict[str, Callable[[Any, list[str]], None]] = {
    "examples": examples, "families": families, "fsdp": sharded, "constraints": constraints, "topologies": topologies,
    "growth": growth,
}  # fmt: skip


def main() -> None:
    settings = harness.arguments(__doc__, "PART [NAME]", bfloat16=False, effort=0)
    part, *words = settings.words or [""]
    for name in [part] if part else PARTS:
        PARTS[name](settings, words)


if __name__ == "__main__":
    main()
