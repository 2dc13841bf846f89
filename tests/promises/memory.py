"""Probes of memory: in place, plans, limits, checkpoints, formats of weights and images, precision."""

from __future__ import annotations

from typing import Any

import numpy as np

import mithril as ml
from mithril import models as m

from .cells import Cell, error, fewer, holds, message, nothing, probe, when
from .networks import CNN, ENCODER, MLP, NETWORKS, Network, bound, called, compiled, each, launches, slopes

SIDE = 256
CHAIN = Network(lambda: m.Model(*(part() for _ in range(4) for part in (m.Relu, m.Tanh))), (SIDE, SIDE))
TENSOR = SIDE * SIDE * 4


def measured(subject: Any, network: Network) -> int:
    """Return the bytes of one call, as the allocator of the engine counts them."""
    x = {"input": subject.backend.array(network.input())}
    subject(x)
    return int(subject.backend.measured_memory(lambda: subject(x), subject.programs[-1].executable))


@probe()
def in_place(engine: str) -> Cell:
    """Measured bytes of a call of 8 activations, in tensors: the result, and one more at most."""
    tensors = measured(bound(CHAIN, engine), CHAIN) / TENSOR
    return when(tensors < 2.2, f"{tensors:.1f} tensors for 8 activations")


@probe()
def in_place_option(engine: str) -> Cell:
    """Measured bytes of a call of Relu(in_place=True) under the same name, against a plain one."""

    def make(**options: Any) -> Any:
        model = m.Model()
        model |= m.Linear(SIDE)(input="input", output="hidden")
        model |= m.Relu(**options)(input="hidden", output="hidden" if options else "active")
        model |= m.Linear(4)(input="hidden" if options else "active", output="output")
        return model

    plain, in_one = (Network(lambda o=o: make(**o), (SIDE, SIDE)) for o in ({}, {"in_place": True}))
    programs = [bound(plain, engine), bound(in_one, engine)]
    before, after = (measured(subject, CHAIN) for subject in programs)
    equal = np.array_equal(called(programs[0], plain), called(programs[1], in_one))
    return when(equal and after < 1.25 * before, f"{before:,} and {after:,} bytes: every activation is in place")


@probe()
def memory_planning(engine: str) -> Cell:
    """Bytes of the arena with separate memory for every value, and planned by lifetimes."""
    if engine not in ("c", "ggml"):
        text = message(compiled(MLP, engine, memory_planning=False), "has no arena")
        return nothing(text)

    def measure(network: Network) -> tuple[float, float]:
        separate, greedy = (compiled(network, engine, memory_planning=plan) for plan in ("apart", "greedy"))
        return separate.memory_report().workspace, greedy.memory_report().workspace

    return fewer(each(measure), "bytes")


@probe()
def lifetimes(engine: str) -> Cell:
    """Measured bytes of a call of 16 products and activations, in tensors of one of them."""
    layers = Network(lambda: m.Model(*(p for _ in range(8) for p in (m.Linear(SIDE), m.Tanh()))), (SIDE, SIDE))
    tensors = measured(bound(layers, engine), layers) / TENSOR
    text = f"{tensors:.1f} tensors for 16 values"
    if engine == "mlx":
        return nothing(f"MLX allocates the results of operations that wait: {text}")
    return when(tensors < 5, text)


@probe()
def memory_limit(engine: str) -> Cell:
    """Programs under max_memory_gb: one byte more than needed, and one less."""
    for network in NETWORKS:
        needed = compiled(network, engine).memory_report().peak
        compiled(network, engine, max_memory_gb=f"{needed + 1}B")
        text = error(lambda network=network, needed=needed: compiled(network, engine, max_memory_gb=f"{needed - 1}B"))
    return when("this program needs" in text, f"an error before any work: {text}")


@probe()
def memory_error(engine: str) -> Cell:
    """Return the remedies that the error of a memory limit names."""
    try:
        compiled(Network(MLP.make, (4096, 16)), engine, max_memory_gb="200kB")
    except ml.MemoryLimitError as raised:
        text = str(raised)
        return when("a batch of" in text, text.splitlines()[-1].strip())
    raise AssertionError("no error is raised")


DEEP = (
    Network(lambda: m.Model(*(p for _ in range(8) for p in (m.Linear(64), m.Gelu())), m.Linear(4)), (256, 64)),
    Network(
        lambda: m.Model(
            *(p for _ in range(6) for p in (m.Conv2d(8, 8, kernel_size=3, padding=1), m.Relu())),
            m.GlobalAvgPool2d(),
            m.Linear(4),
        ),
        (4, 8, 16, 16),
    ),
    Network(
        lambda: m.Model(*(m.TransformerEncoderLayer(16, 2, 32, dropout=0.0) for _ in range(6)), m.Linear(4)),
        (4, 16, 16),
    ),
)


def gradients(network: Network, engine: str, **options: Any) -> tuple[int, dict[str, Any], Any]:
    """Return the measured bytes of a call with gradients, these, and the reported memory."""
    subject = compiled(network, engine, **options)
    params, backend = subject.randomize_params(seed=0), subject.backend
    arguments = params, {"input": backend.array(network.input())}, backend.array(_slope(subject, network, params))
    results = subject.evaluate(*arguments)
    executable = subject.program_for(True).executable
    observed = backend.measured_memory(lambda: subject.evaluate(*arguments), executable)
    use = subject.memory_report(gradients=True).use
    return int(observed), {name: backend.to_numpy(x) for name, x in results[1].items()}, use


def _slope(subject: Any, network: Network, params: Any) -> Any:
    output = subject.evaluate(params, {"input": network.input()}, training=False)["output"]
    return np.ones(tuple(output.shape), np.float32)


@probe(timed=True)
def checkpointing(engine: str) -> Cell:
    """Measured bytes of a call with gradients of deep networks, without and with checkpoints; gradients are equal."""
    pairs = []
    for network in DEEP:
        (before, expected, _), (after, observed, _) = (
            gradients(network, engine, gradient_checkpointing=on, **({"checkpoint_segments": 4} if on else {}))
            for on in (False, True)
        )
        for name, x in expected.items():
            np.testing.assert_allclose(observed[name], x, rtol=1e-3, atol=1e-4)
        pairs.append((before, after))
    return fewer(pairs, "bytes")


@probe(timed=True)
def memory_figure(engine: str) -> Cell:
    """Bytes by memory_report, of those of a call with gradients: within 15 %, or the error that the report prints."""
    ratios, are_right = [], True
    for small in DEEP:
        network = Network(small.make, (8 * small.shape[0], *small.shape[1:]))  # Python's objects are a small part
        for options in ({}, {"gradient_checkpointing": True, "checkpoint_segments": 4}):
            measured, _, use = gradients(network, engine, **options)
            low, high = (-0.15, 0.15) if use.exact else use.error
            ratios.append(use.workspace / measured)
            are_right &= low - 0.01 <= ratios[-1] - 1 <= high + 0.01
    return when(are_right, f"{', '.join(f'{ratio:.2f}' for ratio in ratios)}: {use.label}")


@probe()
def checkpoint_decision(engine: str) -> Cell:
    """Operations of a program with gradients, without and with checkpoints: some run twice."""
    pairs = []
    for network in DEEP[:1]:
        counts = []
        for on in (True, False):
            subject = compiled(network, engine, gradient_checkpointing=on)
            subject.evaluate(
                subject.randomize_params(seed=0), {"input": network.input()}, np.ones((256, 4), np.float32)
            )
            counts.append(len(subject.programs[-1].graph.nodes))
        pairs.append((counts[0], counts[1]))
    return fewer(pairs, "nodes, with and without")


@probe()
def image_order(engine: str) -> Cell:
    """Return the effect of memory_format='channels_last' on a network of images."""
    text = message(compiled(CNN, engine, memory_format="channels_last"), "memory_format")
    return nothing(text) if "no effect" in text else holds(text)


@probe()
def weight_order(engine: str) -> Cell:
    """Launches of a call with bound weights, before and after inference=True stores them as the products read them."""
    layers = Network(lambda: m.Model(m.Linear(64), m.Linear(64), m.Conv2d(2, 4, kernel_size=3)), (1, 2, 8, 64))

    def transposes(**options: Any) -> int:
        graph = bound(layers, engine, **options).programs[-1].executable.graph
        return sum(node.op.name == "transpose" for node in graph.nodes)

    reason = "its products read both orders" if engine in ("torch", "mlx", "ggml") else None
    return fewer([(transposes(), transposes(inference=True))], "transposes", reason)


@probe()
def packed_weights(engine: str) -> Cell:
    """Bytes of a weight with 90 % zeros: dense, and packed in blocks; products are computed."""
    model = Network(lambda: m.Model(m.Linear(64, 128, name="first")), (4, 64))
    arrays = compiled(model, "numpy").randomize_params(seed=0)
    weights = ml.sparsify(arrays, pattern="*.weight", sparsity=0.9, format="block1x16")
    subject = compiled(model, engine, static_inference=True).bind(weights)
    figure = f"32,768 to {weights['first.weight'].nbytes:,} bytes"
    expected = model.input() @ weights["first.weight"].decoded().T + arrays["first.bias"]
    np.testing.assert_allclose(called(subject, model), expected, rtol=1e-3, atol=1e-4)
    decoded = [d.message for d in subject.decisions if "decoded" in d.message]
    return nothing(decoded[0].splitlines()[0]) if decoded else holds(figure)


@probe()
def precision(engine: str) -> Cell:
    """Bytes of all parameters in float32 and in bfloat16, and the relative error of the output."""
    figures = []
    for network in NETWORKS:
        half = bound(network, engine, precision="bfloat16")
        full = compiled(network, engine)
        drawn = full.randomize_params(seed=0)
        full.bind(drawn)
        names = list(half.params)
        bytes_of = [
            sum(int(np.prod(subject.params[n].shape)) * size for n in names) for subject, size in ((full, 4), (half, 2))
        ]
        kinds = {str(half.params[n].dtype).rpartition(".")[2] for n in names}
        if kinds != {"bfloat16"}:
            return when(False, f"parameters have the dtypes {kinds}")
        figures.append(bytes_of)
    return fewer([(a, b) for a, b in figures], "bytes")


@probe()
def mixed_precision(engine: str) -> Cell:
    """Products in bfloat16 of each network; norms and softmax stay float32, and parameters, too."""
    counts = []
    for network in NETWORKS:
        graph = compiled(network, engine, mixed_precision=True).programs[-1].graph
        kinds = {n.op.name: n.result.dtype.name for n in graph.nodes}
        low = [
            n
            for n in graph.nodes
            if n.op.name in ("linear", "conv", "matmul") and n.operands[0].dtype.name == "bfloat16"
        ]
        if not all(i.type.dtype.name == "float32" for i in graph.with_role("param")):
            return when(False, "parameters are not float32")
        if kinds.get("layer_norm", "float32") != "float32" or kinds.get("softmax", "float32") != "float32":
            return when(False, f"{kinds}")
        counts.append(len(low))
    return when(all(counts), f"{', '.join(map(str, counts))} products in bfloat16")


@probe()
def inputs_of_half_precision(engine: str) -> Cell:
    """Return the input dtype with types={"input": float16}; a float32 batch is converted."""
    subject = compiled(MLP, engine, types={"input": ml.float16})
    subject.bind(subject.randomize_params(seed=0))
    called(subject, MLP)
    return when(str(subject.get_types()["input"]) == "float16", "the input is float16")


@probe()
def inference_mode(engine: str) -> Cell:
    """Launches of a call with bound weights, without and with inference=True; gradients are refused."""

    def measure(network: Network) -> tuple[float, float]:
        subject = bound(network, engine, inference=True)
        assert "inference" in error(
            lambda: subject.evaluate(subject.params, {"input": network.input()}, slopes(network))
        )
        return launches(bound(network, engine)), launches(subject)

    return fewer(each(measure), "launches")


@probe()
def static_inference(engine: str) -> Cell:
    """Parameters that a call passes, without and with static_inference=True; values are equal."""
    pairs = []
    for network in NETWORKS:
        plain = bound(network, engine)
        static = compiled(network, engine, static_inference=True).bind(plain.params)
        np.testing.assert_allclose(called(static, network), called(plain, network), rtol=1e-3, atol=1e-4)
        pairs.append(tuple(len(subject.programs[-1].interface.params) for subject in (plain, static)))
    return fewer(pairs, "parameters")  # type: ignore[arg-type]


@probe()
def quantized(engine: str) -> Cell:
    """Largest error of int8 weights, relative to the output: GGMLBackend(quantize='int8'), and packed elsewhere."""
    if engine != "ggml":
        return nothing("quantize= is a keyword of GGMLBackend; see quantization on the other engines")
    errors = []
    for network in (Network(lambda: m.Model(m.Linear(64), m.Relu(), m.Linear(32)), (4, 64)), ENCODER):
        plain = bound(network, engine, inference=True)
        subject = compiled(network, ml.GGMLBackend(quantize="int8"), inference=True).bind(plain.params)
        expected = called(plain, network)
        errors.append(float(np.abs(called(subject, network) - expected).max() / np.abs(expected).max()))
    return when(0 < max(errors) < 0.03, f"error {', '.join(f'{100 * e:.2f} %' for e in errors)}")


@probe("ggml", elsewhere="mem_size is a keyword of GGMLBackend; the option max_memory_gb is for all")
def memory_of_ggml(engine: str) -> Cell:
    """Return a program that is larger than GGMLBackend(mem_size=)."""
    small = Network(MLP.make, (512, 16))
    text = error(lambda: bound(small, ml.GGMLBackend(mem_size=20_000)))
    bound(small, ml.GGMLBackend(mem_size=1 << 24))
    return when("20" in text, f"an error before any work: {text}")


@probe()
def benchmark(engine: str) -> Cell:
    """Metrics of run_benchmark: throughput is rows per latency, and the memory is that of the engine."""
    subject = bound(CHAIN, engine)
    config = ml.BenchmarkConfig(warmup_iterations=1, benchmark_iterations=3)
    result = ml.run_benchmark(model=subject, inputs={"input": CHAIN.input()}, config=config)
    ratio = result.throughput * result.latency / SIDE
    tensors = result.memory_usage / TENSOR
    return when(0.99 < ratio < 1.01 and 2 <= tensors < 4, f"{tensors:.1f} tensors with the input")
