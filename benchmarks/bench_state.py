"""Time and memory of a decoding step at several positions of a cache of 2,048 positions.

    python benchmarks/bench_state.py [--backends c,numpy,ggml,jax,torch,mlx] [--rows 4]

The model is two attention layers of 12 heads of 64 elements, whose state is four arrays of 6.3 MB. A row is the least
time of a step at each position on one thread, and the bytes that a step allocates at its peak. Several rows of a batch
are at positions of their own: the second at half the position of the first, the third at a third of it.
"""

from __future__ import annotations

import argparse
import time
import tracemalloc

import numpy as np

import mithril as ml
from mithril.models import IOKey, Model, MultiHeadAttention

CAPACITY, FEATURES = 2048, 768
POSITIONS = (16, 256, 1024, 2000)


def decoder():
    """Return two attention layers with caches, which share their position."""
    x, position = IOKey("input"), IOKey("position")
    for k in range(2):
        x = MultiHeadAttention(FEATURES, 12, cache=CAPACITY, name=f"layer{k}")(x, position)
    return Model.create(outputs={"output": x})


def peak_of_step(backend, step):
    """Return the bytes that a step allocates at its peak, by the allocator that the backend uses."""
    if backend == "torch":
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            step()
        return max(0, *(e.self_cpu_memory_usage for e in recorded.key_averages()))  # of the largest operation
    if backend == "mlx":
        import mlx.core as mx

        mx.reset_peak_memory()
        before = mx.get_active_memory()
        step()
        return mx.get_peak_memory() - before
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    step()
    peak = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    return peak


def main():
    """Print a row for each backend."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backends", default="c,numpy,ggml,jax,torch,mlx")
    parser.add_argument("--rows", type=int, default=1)
    arguments = parser.parse_args()
    rows = arguments.rows
    for backend in arguments.backends.split(","):
        x = np.random.default_rng(0).normal(size=(rows, 1, FEATURES)).astype(np.float32)
        shapes = {"input": [rows, 1, FEATURES], "position": [rows] if rows > 1 else []}
        compiled = ml.compile(decoder(), backend, inference=True, shapes=shapes, num_threads=1)
        runner = compiled.runner(compiled.randomize_params(0))
        to_numpy = compiled.backend.to_numpy
        row = []
        for position in POSITIONS:
            starts = position // np.arange(1, rows + 1, dtype=np.int32)
            inputs = {"input": x, "position": starts if rows > 1 else starts[0]}
            times = []
            for _ in range(30):
                start = time.perf_counter()
                to_numpy(runner(inputs)["output"])
                times.append(time.perf_counter() - start)
            row.append(f"{min(times) * 1e6:8.0f}")
        peak = peak_of_step(backend, lambda inputs=inputs: to_numpy(runner(inputs)["output"]))
        print(f"{backend:6}", *row, "us", f"{peak / 1e6:8.2f} MB", flush=True)


if __name__ == "__main__":
    main()
