"""Costs and benefits of the MLX utilities: ``python benchmarks/bench_utilities.py [section ...]``.

Sections: pool, cache, profiler, fusion, tuning, batches, estimates. Variants are interleaved, and
run-queue wait is excluded; figures measured on Linux do not apply to Apple's hardware. ``estimates`` runs the models of
``examples/`` and takes names of backends, too: ``estimates mlx numpy``.
"""

from __future__ import annotations

import statistics
import time

import harness
import numpy as np

import mithril as ml
from mithril.compiler import make_backend, resolve_options
from mithril.system import time_interleaved
from mithril_mlx import (
    MlxAutoTuner,
    MlxBatchOptimizer,
    MlxKernelFusion,
    MlxMemoryOptimizer,
    MlxProfiler,
    MlxTensorCache,
)
from mithril_mlx.mlx_loader import mx
from mithril_mlx.utilities.op_chain import build, chain, type_of
from mithril_tools.calibrate import Measured, fit_coefficients, measure
from mithril_tools.calibration_models import corpus
from mithril_tools.cost_model import costly_nodes
from mithril_tools.op_timing import sample_key

RNG = np.random.default_rng(0)


def random(*shape):
    return mx.array(RNG.standard_normal(shape).astype(np.float32))


def race(ways):
    return time_interleaved(
        ways, mx.eval, seconds=2.0, rounds=20, hopeless=float("inf"), of=lambda times: float(np.quantile(times, 0.25))
    )


def line(name, value):
    print(f"  {name:<58}{value}")


def pool():
    """Handing NumPy's data to MLX: a new array each time, or a staged one."""
    for shape in ((64, 784), (1024, 1024), (32, 3, 224, 224)):
        data, memory = RNG.standard_normal(shape).astype(np.float32), MlxMemoryOptimizer(4)
        lease = memory.get_or_create_tensor(shape)

        def new():
            mx.eval(mx.array(data))

        def lent():
            with memory.staged(shape) as tensor:
                tensor.fill(data)

        timings = race({"new": new, "filled": lambda: lease.fill(data), "lent": lent})
        ratios = (
            f"{timings['new'] / timings['filled']:.2f}x, with lease and return {timings['new'] / timings['lent']:.2f}x"
        )
        line(f"new array over filling one in place, {shape}", ratios)
    memory = MlxMemoryOptimizer(8)
    sizes = [(n, 128) for n in (1, 2, 4, 8, 16, 32)]
    for _ in range(2000):
        leases = [memory.get_or_create_tensor(sizes[k]) for k in RNG.integers(0, len(sizes), 3)]
        for lease in leases:
            memory.return_to_pool(lease)
    line("hit rate, 3 of 6 shapes at a time, room for 8", f"{100 * memory.get_stats().hit_rate:.1f} %")
    timings = harness.interleaved({"lease": lambda: memory.return_to_pool(memory.get_or_create_tensor((1, 128)))})
    line("a lease and its return", f"{1e6 * timings['lease']:.1f} us")


def cache():
    """Zipf-distributed requests: a few keys are requested often."""
    keys, small = np.minimum(RNG.zipf(1.3, 20_000), 1000), mx.zeros(1)
    for size in (50, 200):
        cache = MlxTensorCache(size)
        for key in keys:
            if cache.get(int(key)) is None:
                cache.put(int(key), small)
        line(f"hit rate, 1000 keys by Zipf (1.3), room for {size}", f"{100 * cache.counts.hit_rate:.1f} %")
    cache = MlxTensorCache(100)
    tensor = random(256, 256)
    cache.put("w", tensor)
    timings = harness.interleaved(
        {"hit": lambda: cache.get("w"), "miss": lambda: cache.get("v"), "put": lambda: cache.put("w", tensor)}
    )
    line("a hit, a miss, a put of 256 kB", ", ".join(f"{1e6 * timings[n]:.1f} us" for n in ("hit", "miss", "put")))


def profiler():
    """Time the same operation bare and between start and end."""
    for size in (8, 256, 1024):
        a, timer = random(size, size), MlxProfiler()

        def bare():
            mx.eval(a @ a)

        def timed():
            timer.start_operation("matmul")
            timer.end_operation(a @ a)

        timings = race({"bare": bare, "timed": timed})
        timer.reset()
        extra = timings["timed"] - timings["bare"]
        line(
            f"matmul of {size}: more when profiled", f"{1e6 * extra:.1f} us ({timings['timed'] / timings['bare']:.2f}x)"
        )


def fusion():
    """Rows of operations one by one, and fused."""
    rows = {
        "matmul, add": ([random(256, 512), random(512, 512), random(512)], ["matmul", "add"]),
        "add, multiply (1024x1024)": ([random(1024, 1024) for _ in range(3)], ["add", "multiply"]),
        "relu, tanh, sigmoid (512x512)": ([random(512, 512)], ["relu", "tanh", "sigmoid"]),
        "quantize, dequantize (512x512)": (
            [random(512, 512), mx.array(0.1), mx.array(0.1)],
            ["quantize", "dequantize"],
        ),
    }
    for name, (arrays, operations) in rows.items():
        fusing = MlxKernelFusion(eliminate_quantization=True)
        fusing.try_fuse(operations, arrays)
        unfused = build(chain(operations, [type_of(a) for a in arrays]), jit=False)
        timings = race(
            {
                "unfused": lambda: mx.eval(unfused(*arrays)),
                "fused": lambda: mx.eval(fusing.try_fuse(operations, arrays)),
            }
        )
        text = (
            f"{timings['unfused'] / timings['fused']:.2f}x"
            if not fusing.decisions.of("fallback")
            else str(fusing.decisions)
        )
        line(f"unfused over fused: {name}", text)


def tuning():
    """Time the defaults of five operations against the tuner's choices."""
    x, w, image, weights = random(32, 1024), random(1024, 1024), random(4, 32, 32, 16), random(32, 3, 3, 16)
    w_t = mx.contiguous(w.T)
    q, k, v = (random(1, 8, 256, 64) for _ in range(3))
    mx.eval(w_t, x, w, image, weights, q, k, v)

    def im2col(image, weights):
        n, h, width, c = image.shape
        padded = mx.pad(image, ((0, 0), (1, 1), (1, 1), (0, 0)))
        patches = [padded[:, i : i + h, j : j + width] for i in range(3) for j in range(3)]
        rows = mx.concatenate(patches, axis=-1).reshape(-1, 9 * c)
        return (rows @ weights.reshape(weights.shape[0], -1).T).reshape(n, h, width, -1)

    def attention(q, k, v):
        return mx.softmax(q @ k.swapaxes(-1, -2) / 8.0, axis=-1) @ v

    def norm(x):
        mean = x.mean(-1, keepdims=True)
        return (x - mean) * mx.rsqrt(x.var(-1, keepdims=True) + 1e-5)

    def gelu(x):
        return x * 0.5 * (1 + mx.erf(x / 2**0.5))

    chunks = {f"{n} parts": lambda x, n=n: mx.concatenate([p @ w for p in mx.split(x, n)]) for n in (2, 4)}
    questions = {
        "product, x @ w": ({"default": lambda x: x @ w, "weights transposed": lambda x: x @ w_t.T, **chunks}, [x]),
        "convolution": ({"default": lambda i, w: mx.conv2d(i, w, padding=1), "as a product": im2col}, [image, weights]),
        "attention, written out": (
            {"default": attention, "kernel": lambda *a: mx.fast.scaled_dot_product_attention(*a, scale=0.125),
             "compiled": mx.compile(attention)}, [q, k, v]),
        "layer norm, written out": (
            {"default": norm, "kernel": lambda x: mx.fast.layer_norm(x, None, None, 1e-5),
             "compiled": mx.compile(norm)}, [x]),
        "gelu, written out": ({"default": gelu, "compiled": mx.compile(gelu)}, [random(256, 1024)]),
    }  # fmt: skip
    for name, (ways, arrays) in questions.items():
        tuning = MlxAutoTuner(False).tune(name, ways, arrays, seconds=1.0)
        timings = race({n: lambda n=n: mx.eval(ways[n](*arrays)) for n in {"default", tuning.best}})
        line(f"default over tuned: {name}", f"{timings['default'] / timings[tuning.best]:.2f}x ({tuning.best})")


def batches():
    """Time single requests against the tuned batch size."""
    from mithril.models import Linear, Relu, Sequential

    compiled = ml.compile(
        Sequential(Linear(512), Relu(), Linear(512)), "mlx", shapes={"input": ["N", 256]}, inference=True
    )
    data = RNG.standard_normal((2048, 256)).astype(np.float32)
    params = compiled.randomize_params(0, {"input": data[:1]})
    optimizer = MlxBatchOptimizer("64MB")
    size = optimizer.find_model_batch_size(compiled, {"input": data[:1]}, most=512)
    (output,) = compiled.evaluate(params, {"input": data[:1]})

    def process(batch):
        return compiled.evaluate(params, {"input": batch})[output]

    ways = {n: lambda n=n: optimizer.process_in_batches("x", data, process, batch_size=n) for n in (1, size)}
    timings = race(ways)
    line(f"rows one by one over batches of {size}", f"{timings[1] / timings[size]:.1f}x")


def estimates(*backends):
    """Calibrated on a corpus of other models; then told and measured for the models of examples/."""
    import bert
    import gpt
    import lstm_lm
    import resnet18
    import unet
    import vit

    tokens = RNG.integers(0, 1000, (2, 32)).astype(np.int32)
    images = RNG.standard_normal((2, 3, 64, 64)).astype(np.float32)
    mask = np.arange(32) < np.array([[32], [20]])
    models = {  # as the examples run them
        "bert": (bert.bert(1000, 64, layers=4, heads=4, features=128),
                 {"tokens": tokens, "segments": np.zeros_like(tokens), "mask": mask}),
        "gpt": (gpt.gpt(vocabulary=256, length=64, layers=4, heads=4, features=128), {"input": tokens[:1, :16] % 256}),
        "lstm_lm": (lstm_lm.lstm_lm(1000, 128), {"input": np.tile(tokens[:, :24], (2, 1))}),
        "resnet18": (resnet18.resnet18(), {"input": images}),
        "unet": (unet.unet(width=16, depth=3), {"input": images[:1]}),
        "vit": (vit.vit(64, 16, 10, layers=4, heads=4, features=128), {"input": images}),
    }  # fmt: skip
    for backend in backends or ("mlx", "numpy"):
        start, graphs = time.perf_counter(), corpus()
        backend_instance = make_backend(backend, resolve_options({}))
        everything = measure(
            backend_instance, {**graphs, **models}, rounds=10
        )  # together: the machine is as busy for all of them
        count = len(graphs)
        seen = {sample_key(n) for graph in everything.graphs[:count] for n in costly_nodes(graph.nodes)}
        samples = [s for s in everything.samples if (s.op, s.kind, s.size) in seen]  # of the corpus, and no others
        costs = fit_coefficients(Measured(everything.graphs[:count], everything.call_seconds[:count], samples))
        fit = f"{time.perf_counter() - start:.0f} s; 9 of 10 within {100 * costs.relative_error:.0f} %"
        line(f"{backend}: {len(samples)} samples of {count} models", fit)
        errors = []
        for name, graph, real in zip(models, everything.graphs[count:], everything.call_seconds[count:], strict=True):
            estimate = costs.estimate(graph).seconds
            errors.append(abs(estimate / real - 1))
            figures = f"{1e3 * estimate:8.3f} ms {1e3 * real:8.3f} ms {100 * (estimate / real - 1):+6.0f} %"
            line(f"  {name}: told, measured", figures)
        line("  mean and largest error", f"{100 * statistics.mean(errors):.0f} %, {100 * max(errors):.0f} %")


SECTIONS = {f.__name__: f for f in (pool, cache, profiler, fusion, tuning, batches, estimates)}


def main():
    words = harness.arguments(__doc__, "SECTION").words
    sections = [w for w in words if w in SECTIONS] or list(SECTIONS)
    for name in sections:
        print(f"{name}: {SECTIONS[name].__doc__.splitlines()[0]}")
        SECTIONS[name](*([w for w in words if w not in SECTIONS] if name == "estimates" else ()))


if __name__ == "__main__":
    main()
