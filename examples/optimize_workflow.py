"""Every utility around MLX at work on one classifier: planned, tuned, fed from staged buffers, cached, profiled.

``python examples/optimize_workflow.py``, on Linux as on a Mac.
"""

from __future__ import annotations

import argparse

import numpy as np

import mithril as ml
from mithril.models import LayerNorm, Linear, Relu, Sequential
from mithril_mlx import (
    GraphBuilder,
    MlxAutoTuner,
    MlxBatchOptimizer,
    MlxKernelFusion,
    MlxMemoryOptimizer,
    MlxProfiler,
    MlxTensorCache,
)
from mithril_mlx.mlx_loader import mx


def plan() -> None:
    """Estimate the cost of the first layer before anything runs."""
    builder = GraphBuilder()
    images = builder.input("input", [1, 784])
    weights = builder.input("weights", [784, 10])
    builder.output(builder.matmul(images, weights), "logits")
    plan = builder.build().generate_execution_plan()
    print("Optimization plan ready:")
    print(f"  {len(plan.fusion_opportunities)} fusion opportunities")
    print(f"  {len(plan.memory_plan.memory_groups)} memory groups")
    print(f"  {1e6 * plan.estimated_execution_time:.0f} microseconds by {plan.estimated_by}")


def infer(rows: int) -> np.ndarray:
    """Class scores of many images."""
    memory, profiler = MlxMemoryOptimizer(50, "2GB"), MlxProfiler()
    cache, fusion = MlxTensorCache(20, ttl=300), MlxKernelFusion()
    tuner, batches = MlxAutoTuner(store=False), MlxBatchOptimizer("256MB")

    model = Sequential(Linear(256), Relu(), LayerNorm(256), Linear(10))
    images = np.random.default_rng(0).standard_normal((rows, 784)).astype(np.float32)
    compiled = ml.compile(model, "mlx", shapes={"input": ["N", 784]}, custom_passes=[fusion.rules], inference=True)
    weights = cache.get_or_compute("model_weights", lambda: compiled.randomize_params(0, {"input": images[:1]}))

    size = batches.find_model_batch_size(compiled, {"input": images[:1]}, most=64)
    output = next(iter(compiled.evaluate(weights, {"input": images[:size]})))
    print(f"Batches of {size} images; a call takes at most {memory.check(compiled, {'input': images[:size]})} bytes")

    def direct(batch: np.ndarray) -> mx.array:
        return compiled.evaluate(weights, {"input": batch})[output]

    def staged(batch: np.ndarray) -> mx.array:
        """Compute the same through a pooled buffer, timed."""
        with memory.staged(batch.shape) as buffer, profiler.operation("inference") as running:
            return running.waits(direct(buffer.fill(batch)))

    ways = {"direct": lambda: direct(images[:size]), "staged": lambda: staged(images[:size])}
    tuning = tuner.tune("feeding", ways)
    scores = np.array(batches.process_in_batches("images", images, staged, batch_size=size))

    average, (fastest, slowest), runs = profiler.get_all_stats()["inference"]
    print(f"Inference: {1e3 * average:.2f} ms on average, {1e3 * fastest:.2f} to {1e3 * slowest:.2f}, {runs} runs")
    print(f"Faster way to feed it here: {tuning.best}, {tuning.speedup:.2f} times as fast")
    print(f"Pool: {100 * memory.get_stats().hit_rate:.0f} % hits; cache: {cache.stats()}")
    for decision in fusion.decisions:
        print(decision)
    return scores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1000)
    plan()
    scores = infer(parser.parse_args().rows)
    print(f"Scores {scores.shape}, classes {np.bincount(scores.argmax(axis=1), minlength=10)}")


if __name__ == "__main__":
    main()
