"""How long the first result takes in a fresh process: the C backend, jax.jit, torch.compile, onnxruntime.

``python benchmarks/bench_c_start.py [words of the rows]``: seconds from a model in memory (for onnxruntime, a file) to
its first result, including imports except those of torch and mithril, which hold the model; in brackets CPU seconds,
which other programs disturb less. The engines start alternately, the better of two processes counts; ``again`` starts
with the disk cache of an earlier process. ``jax.jit`` is the same graph on the JAX backend.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROWS = ("MLP batch 32", "ResNet-18 at 224", "encoder 6 layers, 384")
ENGINES = ("mithril", "mithril again", "jax.jit", "torch.compile", "torch.compile again", "onnxruntime")
TURNS = 2


def first(engine: str, row: str, folder: str) -> tuple[float, float]:
    """Time this process: wall seconds, and CPU seconds of all threads and children."""
    import time

    import bench_c
    import numpy as np
    import torch

    import mithril as ml

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
        with bench_c.quiet():
            torch.onnx.export(module, tuple(tensors), file, dynamo=True, verbose=False)
    begin, before = time.perf_counter(), os.times()
    if engine.startswith("mithril"):
        compiled: Any = ml.compile(work.model, "c", shapes=shapes, inference=True, cache=True, cache_dir=folder)
        compiled.evaluate(compiled.randomize_params(0), inputs)
    elif engine == "jax.jit":
        of_jax: Any = ml.compile(work.model, "jax", shapes=shapes, inference=True)
        np.asarray(of_jax.evaluate(of_jax.randomize_params(0), inputs)["output"])
    elif engine == "onnxruntime":
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = bench_c.THREADS
        session = onnxruntime.InferenceSession(file, options, ["CPUExecutionProvider"])
        session.run(None, dict(zip([i.name for i in session.get_inputs()], inputs.values(), strict=True)))
    else:
        with torch.no_grad():
            torch.compile(module)(*tensors)
    after = os.times()
    return time.perf_counter() - begin, sum(after[:4]) - sum(before[:4])


def fresh(engine: str, row: str, folder: str) -> tuple[float, float]:
    """Run a new process with the caches in a folder; return its wall and CPU seconds."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder}
    command = [sys.executable, __file__, "--first", engine, row, folder]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode != 0:
        raise SystemExit(done.stderr)
    wall, processor = json.loads(done.stdout.splitlines()[-1])
    return wall, processor


def measure(row: str) -> None:
    """Print the seconds of every engine, after one process each that fills the cache of ``again``."""
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


def main() -> None:
    if "--first" in sys.argv:
        engine, row, folder = sys.argv[2:]
        print(json.dumps(first(engine, row, folder)))
        return
    for row in ROWS:
        if not sys.argv[1:] or any(word in row for word in sys.argv[1:]):
            measure(row)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
