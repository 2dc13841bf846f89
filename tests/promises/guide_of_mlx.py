"""Probes of the utilities around MLX."""

from __future__ import annotations

import tempfile
import threading
from typing import Any

import numpy as np

from mithril.system import time_interleaved

from .cells import Cell, fewer, probe, when

ALONE = "a utility of mithril-mlx; it works on arrays of MLX"


def of_mlx(timed: bool = False) -> Any:
    return probe("mlx", elsewhere=ALONE, timed=timed)


def mx() -> Any:
    from mithril_mlx.mlx_loader import mx as loaded

    return loaded


@of_mlx()
def mlx_pool(engine: str) -> Cell:
    """Allocations of 10 tensors that are returned to the pool, against 10 without returning."""
    from mithril_mlx import MlxMemoryOptimizer

    counts = []
    for returned in (False, True):
        pool = MlxMemoryOptimizer(100)
        is_right = []
        for _ in range(10):
            tensor = pool.get_or_create_tensor([64, 128], mx().float32, "cpu")
            if returned:
                pool.return_to_pool(tensor, "cpu")
            else:
                is_right.append(tensor)
        counts.append(pool.get_stats().total_allocations)
    return fewer([(counts[0], counts[1])], "allocations")


@of_mlx()
def mlx_pool_size(engine: str) -> Cell:
    """Free tensors that a pool of 2 keeps of 5 returned ones."""
    from mithril_mlx import MlxMemoryOptimizer

    pool = MlxMemoryOptimizer(2)
    tensors = [pool.get_or_create_tensor([8], mx().float32, "cpu") for _ in range(5)]
    for tensor in tensors:
        pool.return_to_pool(tensor, "cpu")
    for _ in range(5):
        pool.get_or_create_tensor([8], mx().float32, "cpu")
    return when(pool.get_stats().pool_hits == 2, f"{pool.get_stats().pool_hits} hits of 5")


@of_mlx()
def mlx_pool_statistics(engine: str) -> Cell:
    """Statistics of a pool: the six counts of the guide."""
    from mithril_mlx import MlxMemoryOptimizer

    pool = MlxMemoryOptimizer(4)
    pool.return_to_pool(pool.get_or_create_tensor([256], mx().float32, "cpu"), "cpu")
    stats = pool.get_stats()
    names = "total_allocations total_deallocations pool_hits pool_misses peak_memory_usage current_memory_usage".split()
    figures = [getattr(stats, name) for name in names]
    return when(figures[0] == 1 and figures[4] >= 1024, f"{figures[4]:,} bytes at the peak")


@of_mlx()
def mlx_batch_layout(engine: str) -> Cell:
    """Contiguous batches that arrays of two shapes become."""
    from mithril_mlx import MlxMemoryOptimizer

    batches = MlxMemoryOptimizer(4).optimize_batch_layout([mx().ones(3), mx().ones(4), mx().zeros(3)])
    return fewer([(3, len(batches))], "arrays")


@of_mlx()
def mlx_profiler(engine: str) -> Cell:
    """Statistics of two operations: averages, ranges and counts."""
    from mithril_mlx import MlxProfiler

    profiler, a = MlxProfiler(), mx().ones((256, 256))
    for _ in range(3):
        profiler.start_operation("product")
        profiler.end_operation(a @ a)
    profiler.start_operation("small")
    profiler.end_operation(mx().ones(1) + 1)
    stats = profiler.get_all_stats()
    average, (low, high), count = stats["product"]
    return when(count == 3 and low <= average <= high and len(stats) == 2, "3 runs and 1, each with average and range")


@of_mlx(timed=True)
def mlx_profiler_evaluates(engine: str) -> Cell:
    """Time of a product of 1024 x 1024 by the profiler: MLX only records it in microseconds."""
    from mithril_mlx import MlxProfiler

    profiler, a = MlxProfiler(), mx().ones((1024, 1024))
    mx().eval(a)
    profiler.start_operation("product")
    seconds = profiler.end_operation(a @ a)
    milliseconds = 1e3 * (seconds.total_seconds() if hasattr(seconds, "total_seconds") else float(seconds))
    return when(milliseconds > 1, "over 1 ms: the result is computed")


@of_mlx()
def mlx_fusion(engine: str) -> Cell:
    """Results of fused sequences for three built-in patterns, and of quantize with dequantize on request."""
    from mithril_mlx import MlxKernelFusion

    x, w, b = mx().array([[1.0, 2.0]]), mx().array([[1.0], [1.0]]), mx().array([0.5])
    fusion = MlxKernelFusion()
    cases = [
        (["add", "multiply"], [x, x, x], [[2.0, 8.0]]),
        (["matmul", "add"], [x, w, b], [[3.5]]),
        (["relu", "tanh"], [x], np.tanh([[1.0, 2.0]]).tolist()),
    ]
    observed = [fusion.try_fuse(names, arrays) for names, arrays, _ in cases]
    is_right = all(y is not None and np.allclose(y, e) for y, (_, _, e) in zip(observed, cases, strict=True))
    return when(is_right, f"{len(observed)} patterns")


@of_mlx()
def mlx_no_fusion(engine: str) -> Cell:
    """Return a sequence that no pattern covers."""
    from mithril_mlx import MlxKernelFusion

    observed = MlxKernelFusion().try_fuse(["sort"], [mx().array([2.0, 1.0])])
    return when(observed is None, "None: the caller computes it")


@of_mlx()
def mlx_own_pattern(engine: str) -> Cell:
    """Return a pattern of the user, and one that computes something else."""
    from mithril_mlx import FusionPattern, MlxKernelFusion

    fusion, a = MlxKernelFusion(), [mx().array([-1.0, 1.0]), mx().array([1.0, 1.0])]
    fusion.add_pattern(FusionPattern("own", ["relu", "add"], lambda v: mx().maximum(v[0], 0) + v[1]))
    fusion.add_pattern(FusionPattern("wrong", ["exp", "exp"], lambda v: mx().exp(v[0])))
    right = fusion.try_fuse(["relu", "add"], a)
    fusion.try_fuse(["exp", "exp"], a[:1])
    return when(right.tolist() == [1.0, 2.0] and "not used" in str(fusion.decisions), "used; the wrong one is refused")


@of_mlx()
def mlx_cache(engine: str) -> Cell:
    """Entries of a cache of 2 after 3, and after their time to live."""
    from datetime import timedelta

    from mithril_mlx import MlxTensorCache

    cache = MlxTensorCache(2, timedelta(hours=1))
    for name in "abc":
        cache.put(name, mx().ones(2))
    sizes = cache.stats()
    expired = MlxTensorCache(2, ttl=1e-9)
    expired.put("a", mx().ones(2))
    is_right = cache.get("a") is None and cache.get("c") is not None and expired.get("a") is None
    return when(is_right and tuple(sizes) == (2, 2), "2 of 3; none after it")


@of_mlx()
def mlx_cache_computes_once(engine: str) -> Cell:
    """Computations of one entry that 8 threads want at once."""
    from mithril_mlx import MlxTensorCache

    cache, calls = MlxTensorCache(4, ttl=60), []

    def make() -> Any:
        calls.append(1)
        return mx().ones(2)

    threads = [threading.Thread(target=cache.get_or_compute, args=("w", make)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return fewer([(8, len(calls))], "computations")


@of_mlx()
def mlx_tuner(engine: str) -> Cell:
    """Return the configuration that the tuner selects of three, and finds again in a new object."""
    from mithril_mlx import MlxAutoTuner

    seconds = {"batch_size_16": 0.100, "batch_size_32": 0.080, "batch_size_64": 0.120}
    with tempfile.TemporaryDirectory() as folder:
        store = {"path": folder} if "path" in MlxAutoTuner.__init__.__annotations__ else {}
        tuner = MlxAutoTuner(**store)
        best = tuner.benchmark_operation("matmul of the ledger", list(seconds), seconds.__getitem__)
        again = MlxAutoTuner(**store).benchmark_operation("matmul of the ledger", list(seconds), seconds.__getitem__)
        optimal = tuner.get_optimal_config("matmul of the ledger")
    return when(best == again == optimal == "batch_size_32", "the fastest of 3; stored")


@of_mlx()
def mlx_batch_size(engine: str) -> Cell:
    """Batch sizes that the optimizer selects without and with a limit of memory."""
    from mithril_mlx import MlxBatchOptimizer

    sizes = [
        MlxBatchOptimizer(limit).find_optimal_batch_size(
            "promise", 128, lambda n: 1e-3 + 1e-6 * n, memory=lambda n: 4096 * n
        )
        for limit in ("1GB", "64kB")
    ]
    return fewer([(sizes[0], sizes[1])], "rows")


@of_mlx()
def mlx_batches(engine: str) -> Cell:
    """Items that are processed in batches, in order."""
    from mithril_mlx import MlxBatchOptimizer

    optimizer = MlxBatchOptimizer("1MB")
    optimizer.find_optimal_batch_size("double", 128, lambda n: 1e-3 + 1e-6 * n, memory=lambda n: 8 * n)
    observed = optimizer.process_in_batches("double", list(range(1000)), lambda b: [2 * x for x in b])
    return when(observed == [2 * x for x in range(1000)], f"{len(observed):,} items")


def graph(bias: Any = (32, 256)) -> Any:
    from mithril_mlx import GraphBuilder

    builder = GraphBuilder()
    x, w, b = (
        builder.input(n, list(s), "f32", "cpu")
        for n, s in (("input", (32, 784)), ("weights", (784, 256)), ("bias", bias))
    )
    hidden = builder.add(builder.matmul(x, w, "cpu"), b, "cpu")
    builder.output(builder.quantize(hidden, 0.1, "cpu"), "predictions")
    return builder.build()


@of_mlx()
def mlx_graph(engine: str) -> Cell:
    """Result of a built graph of the guide, compared with NumPy."""
    rng = np.random.default_rng(0)
    arrays = {
        n: rng.standard_normal(s).astype(np.float32)
        for n, s in (("input", (32, 784)), ("weights", (784, 256)), ("bias", (32, 256)))
    }
    observed = np.array(graph().run(**arrays)["predictions"])
    expected = np.clip(np.round((arrays["input"] @ arrays["weights"] + arrays["bias"]) / 0.1), -128, 127)
    return when(np.abs(observed - expected).max() <= 1, "equal int8 values")


@of_mlx()
def mlx_order(engine: str) -> Cell:
    """Steps of the topological order."""
    return when(len(graph().topological_sort()) == 3, "3 steps, operands first")


@of_mlx()
def mlx_opportunities(engine: str) -> Cell:
    """Fusion opportunities in the graph of the guide."""
    observed = graph().find_fusion_opportunities()
    return when(
        observed and observed[0].estimated_speedup >= 1, f"{len(observed)}: {', '.join(o.pattern for o in observed)}"
    )


@of_mlx(timed=True)
def mlx_measured_opportunity(engine: str) -> Cell:
    """Measured speed-up of an opportunity, against that of the two expressions timed here."""
    observed = graph((256,)).find_fusion_opportunities()[0].measure(0.5)
    rng = np.random.default_rng(0)
    x, w, b = (mx().array(rng.standard_normal(s).astype(np.float32)) for s in ((32, 784), (784, 256), (256,)))
    times = time_interleaved(
        {"separate": lambda: x @ w + b, "fused": lambda: mx().addmm(b, x, w)}, lambda y: mx().eval(y), seconds=0.5
    )
    direct = times["separate"] / times["fused"]
    return when(0.75 < observed / direct < 1.33, f"{observed:.2f} times as fast, {direct:.2f} here")


@of_mlx()
def mlx_layout(engine: str) -> Cell:
    """Bytes of the values of 6 products and softmaxes, in separate memory and planned."""
    from mithril_mlx import GraphBuilder

    builder = GraphBuilder()
    x = builder.input("x", [64, 64])
    for _ in range(6):
        x = builder.apply("softmax", builder.matmul(x, x))
    builder.output(x)
    layout = builder.build().optimize_memory_layout()
    return fewer([(layout.without_reuse, layout.size)], "bytes")


@of_mlx()
def mlx_plan(engine: str) -> Cell:
    """Estimates of the execution plan of the guide."""
    plan = graph().generate_execution_plan()
    return when(
        plan.estimated_memory_usage > 0 and plan.estimated_execution_time > 0,
        f"{plan.estimated_memory_usage:,} bytes, and a time",
    )


@of_mlx()
def mlx_workflow(engine: str) -> Cell:
    """Runs of the complete workflow with one pool and one cache: the cached tensor stays valid."""
    from mithril_mlx import GraphBuilder, MlxMemoryOptimizer, MlxProfiler, MlxTensorCache

    pool, profiler, cache = MlxMemoryOptimizer(50), MlxProfiler(), MlxTensorCache(20, ttl=300)
    builder = GraphBuilder()
    x, w = builder.input("input", [1, 784], "f32", "cpu"), builder.input("weights", [784, 10], "f32", "cpu")
    builder.output(builder.matmul(x, w, "cpu"), "logits")
    plan = builder.build()
    results = []
    for _ in range(2):
        profiler.start_operation("inference")
        weights = cache.get("model_weights")
        if weights is None:
            tensor = pool.get_or_create_tensor([784, 10], mx().float32, "cpu")
            cache.put("model_weights", tensor.fill(1.0))
            weights = cache.get("model_weights")
            pool.return_to_pool(tensor, "cpu")
        logits = plan.run(input=mx().ones((1, 784)), weights=weights)["logits"]
        profiler.end_operation(logits)
        results.append(np.array(logits).tolist())
    return when(results == [[[784.0] * 10]] * 2, "2 runs, equal results")
