"""How long the first result takes in a fresh process: the C backend, torch.compile, onnxruntime.

``python benchmarks/bench_c_start.py [words of the rows]``: seconds from a model in memory (for onnxruntime, a file) to
its first result, including imports except those of torch and mithril, which hold the model; in brackets CPU seconds,
which other programs disturb less. The better of two processes each; ``again`` starts with the disk cache of an earlier
process.
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
ENGINES = ("mithril", "mithril again", "torch.compile", "torch.compile again", "onnxruntime")


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


def fresh(engine: str, row: str) -> tuple[float, float]:
    """Return the better of two processes, after one that fills the cache directory for ``again``."""
    best = (float("inf"), float("inf"))
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(2 + engine.endswith("again")):
            used = folder if engine.endswith("again") else tempfile.mkdtemp(dir=folder)
            environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": used}
            command = [sys.executable, __file__, "--first", engine, row, used]
            done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
            if done.returncode != 0:
                raise SystemExit(done.stderr)
            seconds = json.loads(done.stdout.splitlines()[-1])
            if turn or not engine.endswith("again"):
                best = (min(best[0], seconds[0]), min(best[1], seconds[1]))
    return best


def main() -> None:
    if "--first" in sys.argv:
        print(json.dumps(first(*sys.argv[2:])))
        return
    for row in ROWS:
        if not sys.argv[1:] or any(word in row for word in sys.argv[1:]):
            for engine in ENGINES:
                wall, processor = fresh(engine, row)
                print(f"{row}: {engine} {wall:.2f} s ({processor:.2f} s)", flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
