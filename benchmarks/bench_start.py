"""Seconds to the first result of a fresh process, by engine, and with the cache of a process before.

``python benchmarks/bench_start.py engines [words of the rows]``: the C backend, jax.jit, torch.compile and onnxruntime,
from a model in memory (for onnxruntime, a file) to its first result, including imports except those of torch and
mithril, which hold the model; in brackets CPU seconds, which other programs disturb less. The engines start
alternately, the better of two processes counts; ``again`` starts with the disk cache of an earlier process. ``jax.jit``
is the same graph on the JAX backend.

``... jax`` and ``... torch``: from ``ml.compile`` to the first outputs and gradients, with an empty cache, and with the
cache of an earlier process. ``... gpt``: compiling a GPT of twelve blocks on the C backend, cold and from the cache.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from typing import Any

import harness
import numpy as np

import mithril as ml

ROWS = ("MLP batch 32", "ResNet-18 at 224", "encoder 6 layers, 384")
ENGINES = ("mithril", "mithril again", "jax.jit", "torch.compile", "torch.compile again", "onnxruntime")
TURNS = harness.ROUNDS or 2


def first(engine: str, row: str, folder: str) -> tuple[float, float]:
    """Time this process: wall seconds, and CPU seconds of all threads and children."""
    import bench_c
    import torch
    from peers import onnxruntime_call, quiet

    work = bench_c.WORKS[row]()
    shapes = {n: list(s) for n, s in work.shapes.items()}
    inputs = {n: np.ones(s, np.float32) for n, s in work.shapes.items()}
    reference = ml.compile(work.model, "numpy", shapes=shapes, inference=True)
    weights = {**reference.randomize_params(0), **reference.initial_state()}
    params = {n: torch.from_numpy(np.asarray(x)) for n, x in weights.items()}
    tensors = [torch.from_numpy(x) for x in inputs.values()]
    module = bench_c.Whole(work, bench_c.Plain, params)
    file = f"{folder}/model.onnx"
    if engine == "onnxruntime":
        with quiet():
            torch.onnx.export(module, tuple(tensors), file, dynamo=True, verbose=False)
    begin, before = time.perf_counter(), os.times()
    if engine.startswith("mithril"):
        compiled: Any = ml.compile(work.model, "c", shapes=shapes, inference=True, cache=True, cache_dir=folder)
        compiled.evaluate(compiled.randomize_params(0), inputs)
    elif engine == "jax.jit":
        of_jax: Any = ml.compile(work.model, "jax", shapes=shapes, inference=True)
        np.asarray(of_jax.evaluate(of_jax.randomize_params(0), inputs)["output"])
    elif engine == "onnxruntime":
        onnxruntime_call(file, list(inputs.values()))()
    else:
        with torch.no_grad():
            torch.compile(module)(*tensors)
    after = os.times()
    return time.perf_counter() - begin, sum(after[:4]) - sum(before[:4])


def engines(*words: str) -> None:
    """Print the seconds of every engine, after one process each that fills the cache of ``again``."""

    def fresh(engine: str, row: str, cache: str) -> tuple[float, float]:
        return harness.fresh(first, engine, row, cache, TORCHINDUCTOR_CACHE_DIR=cache)

    for row in harness.selected(dict.fromkeys(ROWS), words):
        best = dict.fromkeys(ENGINES, (float("inf"), float("inf")))
        with tempfile.TemporaryDirectory() as folder:
            filled = {engine: tempfile.mkdtemp(dir=folder) for engine in ENGINES if engine.endswith("again")}
            for engine, cache in filled.items():
                fresh(engine, row, cache)
            for _ in range(TURNS):
                for engine in ENGINES:
                    seconds = fresh(engine, row, filled.get(engine) or tempfile.mkdtemp(dir=folder))
                    best[engine] = (min(best[engine][0], seconds[0]), min(best[engine][1], seconds[1]))
        for engine, (wall, processor) in best.items():
            print(f"{row}: {engine} {wall:.2f} s ({processor:.2f} s)", flush=True)


def gradients(backend: str, name: str, options: dict[str, Any], folder: str) -> float:
    """Return the seconds from compiling to the outputs and gradients of a case of ``models.py``."""
    from models import CASES

    case = CASES[name]()
    x, shapes = {"input": np.ones(case.shape, np.float32)}, {"input": list(case.shape)}
    drawn = ml.compile(case.model, "numpy", shapes=shapes).randomize_params(0)
    engine = getattr(ml, {"jax": "JaxBackend", "torch": "TorchBackend"}[backend])()
    params = {name: engine.array(p) for name, p in drawn.items()}
    engine.synchronize(params)
    start = time.perf_counter()
    compiled = ml.compile(case.model, engine, shapes=shapes, cache=True, cache_dir=folder, **options)
    y = compiled.evaluate(params, x)
    engine.synchronize(compiled.evaluate(params, x, y))
    return time.perf_counter() - start


def cached(backend: str, options: dict[str, Any], name: str, processes: int) -> None:
    """Print the least seconds of processes with an empty cache, and of others after them."""
    times: list[list[float]] = [[], []]
    for _ in range(harness.ROUNDS or processes):
        with tempfile.TemporaryDirectory() as folder:
            for seconds in times:
                elsewhere = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/elsewhere"}
                seconds.append(harness.fresh(gradients, backend, name, options, folder, **elsewhere))
    cold, later = map(min, times)
    title = ", ".join([backend, *(f"{n}={v}" for n, v in options.items()), name])
    print(f"{title}: first process {cold:.2f} s, second {later:.2f} s: {cold / later:.1f}x", flush=True)


def of_jax() -> None:
    cached("jax", {}, "encoder, 6 layers", 3)


def of_torch() -> None:
    cached("torch", {}, "encoder, 6 layers", 3)
    cached("torch", {"jit": True}, "MLP, batch 32", 2)


def compiled_gpt(folder: str) -> tuple[float, float, list[int]]:
    """Return wall and CPU seconds of compiling, and the numbers of functions and calls if TVM compiled them."""
    from gpt import gpt

    model = gpt(vocabulary=1024, length=128, layers=12, heads=12, features=768)
    start, cpu = time.perf_counter(), time.process_time()
    compiled = ml.compile(model, "c", shapes={"input": [1, 64]}, inference=True, cache=True, cache_dir=folder)
    seconds = time.perf_counter() - start, time.process_time() - cpu
    if "tvm" not in sys.modules:
        return *seconds, []
    program = compiled.programs[-1].executable.program
    return *seconds, [len(program.functions), program.calls]


def of_gpt() -> None:
    print("compiling a GPT of 12 blocks, 768 features, 64 tokens; each in a fresh process")
    with tempfile.TemporaryDirectory() as folder:
        for way in ("cold", "from the cache", "from the cache"):
            wall, processor, counts = harness.fresh(compiled_gpt, folder)
            more = f", {counts[0]} functions for {counts[1]} calls" if counts else ""
            print(f"  {way:<16}{wall:>7.2f} s ({processor:.2f} s of the processor){more}", flush=True)


def main() -> None:
    parts = {"engines": engines, "jax": of_jax, "torch": of_torch, "gpt": of_gpt}
    part, *words = harness.arguments(__doc__, "PART [WORD]").words or [""]
    for name in [part] if part else parts:
        parts[name](*words)


if __name__ == "__main__":
    main()
