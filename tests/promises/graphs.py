"""Probes of the graph: fusion, removal, specialization, levels, switches, passes."""

from __future__ import annotations

import contextlib
import io
import tempfile
from typing import Any

import numpy as np

import mithril as ml
from mithril import models as m, ops

from .cells import Cell, by_engine, error, fewer, holds, message, nothing, probe, refused, refused_without_device, when
from .networks import MLP, NETWORKS, Network, bound, called, compiled, each, launches, nodes

COMPILES = "XLA fuses either graph by itself"


def around(make: Any, shape: tuple[int, ...] = (8, 16)) -> Network:
    return Network(make, shape)


def switched(engine: str, network: Network, switch: str, **options: Any) -> tuple[int, int]:
    """Return the launches without and with an optimization."""
    without, with_it = (bound(network, engine, optimizations={switch: on}, **options) for on in (False, True))
    return launches(without), launches(with_it)


@probe()
def fusion(engine: str) -> Cell:
    """Launches of one call without and with fusion."""
    reasons = by_engine(
        numpy="no function of NumPy computes two of these operations",
        torch="its kernels of these networks are separate",
        jax=COMPILES,
        ggml="no kernel of ggml computes two of these operations",
    )
    return fewer(each(lambda n: switched(engine, n, "fusion")), "launches", reasons[engine])


@probe()
def fusion_bytes(engine: str) -> Cell:
    """Bytes of the values of one call without and with fusion."""

    def measure(network: Network) -> tuple[float, float]:
        without, with_it = (compiled(network, engine, optimizations={"fusion": on}) for on in (False, True))
        return without.memory_report().workspace, with_it.memory_report().workspace

    reason = "results are written over operands, or freed, in either graph"
    return fewer(each(measure), "bytes", {"c": None}.get(engine, reason))


def with_dead_part(network: Network) -> Network:
    def make() -> Any:
        model = m.Model()
        model |= network.make()(input="input", output="output")
        model |= m.Linear(4, name="dead")(input="input", output="unused")
        return model.set_outputs("output")

    return Network(make, network.shape)


@probe()
def dead_code(engine: str) -> Cell:
    """Launches with a layer that no output depends on: as an output, and dropped."""

    def measure(network: Network) -> tuple[float, float]:
        larger = with_dead_part(network)
        is_right = compiled(larger, engine, outputs=["output", "unused"])
        is_right.bind(is_right.randomize_params(seed=0))
        is_right({"input": network.input()})
        return launches(is_right), launches(bound(larger, engine))

    return fewer(each(measure), "launches")


@probe()
def dead_interface(engine: str) -> Cell:
    """Parameters drawn for a network with a dead layer: as an output, and dropped."""

    def measure(network: Network) -> tuple[float, float]:
        larger = with_dead_part(network)
        is_right = compiled(larger, engine, outputs=["output", "unused"])
        return len(is_right.randomize_params()), len(compiled(larger, engine).randomize_params())

    return fewer(each(measure), "parameters")


def doubled(network: Network) -> Network:
    def make() -> Any:
        shared, model = network.make(), m.Model()
        model |= shared(input="input", output="left")
        model |= shared(input="input", output="right")
        model |= m.Add()(left="left", right="right", output="output")
        return model

    return Network(make, network.shape)


@probe()
def common_subexpression(engine: str) -> Cell:
    """Launches of a network that computes the same thing twice, without and with merging."""
    return fewer(
        each(lambda n: switched(engine, doubled(n), "common_subexpression")),
        "launches",
        by_engine(jax="XLA merges them by itself")[engine],
    )


@probe()
def constant_folding(engine: str) -> Cell:
    """Launches with an expression of constants, without and with folding."""
    table = np.linspace(0, 1, 16, dtype=np.float32)

    def make() -> Any:
        model = m.Model()
        model |= m.Tanh()(input="table", output="first")
        model |= m.Exp()(input="first", output="second")
        model |= m.Multiply()(left="input", right="second", output="output")
        return model

    pair = switched(engine, around(make), "constant_folding", constants={"table": table}, optimization_level="low")
    return fewer([pair], "launches", by_engine(jax="XLA folds it by itself")[engine])


@probe()
def switch_dead_code(engine: str) -> Cell:
    """Nodes with a result that a pass leaves unused, without and with dead code elimination."""

    class Careless(m.Layer):
        def build(self, input: Any) -> Any:
            ops.exp(input)
            return input

    def measure(network: Network) -> tuple[float, float]:
        larger = Network(lambda: m.Model(Careless(), network.make()), network.shape)
        without, with_it = (
            compiled(larger, engine, optimizations={"dead_code_elimination": on}) for on in (False, True)
        )
        return nodes(without), nodes(with_it)

    return fewer(each(measure), "nodes")


@probe()
def specialization(engine: str) -> Cell:
    """Kinds of operations of a product of one row against 8 rows, and of a 1 x 1 convolution against 3 x 3."""

    def kinds(network: Network) -> list[str]:
        graph = bound(network, engine).programs[-1].executable.graph
        return sorted({node.op.name for node in graph.nodes})

    dense = m.Model(m.Linear(16, bias=False))
    rows = [kinds(Network(lambda: dense, (n, 16))) for n in (8, 1)]
    images = [
        kinds(Network(lambda size=size: m.Model(m.Conv2d(4, 8, kernel_size=size, bias=False)), (1, 4, 6, 6)))
        for size in (3, 1)
    ]
    observed = [f"{', '.join(a)} to {', '.join(b)}" for a, b in (rows, images) if a != b]
    if observed:
        return holds("; ".join(observed))
    reasons = by_engine(
        torch="oneDNN selects the kernel by the sizes",
        c="the kernels are generated for the exact sizes",
        ggml="one kernel of ggml computes products of any size",
    )
    reason = reasons[engine]
    return when(False, f"{rows}, {images}") if reason is None else nothing(reason)


@probe()
def level_none(engine: str) -> Cell:
    """Return the named values of a network that exist in the program at level none: fusion would remove one."""

    def make() -> Any:
        model = m.Model()
        model |= m.Linear(16)(input="input", output="hidden")
        model |= m.Gelu()(input="hidden", output="active")
        model |= m.Linear(4)(input="active", output="output")
        return model

    names = {"hidden", "active", "output"}
    subject = bound(around(make), engine, optimization_level="none")
    graph = subject.programs[-1].executable.graph
    count = len(names & {node.result.name for node in graph.nodes})
    return when(count == 3, f"{count} of 3 values in {len(graph.nodes)} operations")


@probe()
def level_low(engine: str) -> Cell:
    """Launches of networks that compute everything twice, at levels none and low."""
    pairs = each(
        lambda n: tuple(launches(bound(doubled(n), engine, optimization_level=one)) for one in ("none", "low"))  # type: ignore[return-value]
    )
    return fewer(pairs, "launches", COMPILES if engine == "jax" else None)


@probe()
def level_medium(engine: str) -> Cell:
    """Nodes at levels low and medium: spelled-out operations are recognized."""

    def make() -> Any:
        class Spelled(m.Layer):
            def build(self, input: Any) -> Any:
                shifted = ops.exp(input - ops.max(input, axis=-1, keepdims=True))
                return shifted / ops.sum(shifted, axis=-1, keepdims=True)

        return m.Model(m.Linear(16), m.Relu(), Spelled(), m.Linear(4))

    pair = tuple(nodes(bound(around(make), engine, optimization_level=one)) for one in ("low", "medium"))
    return fewer([pair], "nodes")  # type: ignore[list-item]


@probe()
def level_high(engine: str) -> Cell:
    """Products of one operand at levels medium and high."""

    def make() -> Any:
        model = m.Model()
        for name in "abc":
            model |= m.Linear(16, name=name)(input="input", output=name)
        model |= m.Add()(left="a", right="b", output="ab")
        model |= m.Add()(left="ab", right="c", output="output")
        return model

    def products(level: str) -> int:
        with tempfile.TemporaryDirectory() as folder:
            subject = compiled(around(make, (32, 16)), engine, optimization_level=level, cache_dir=folder)
            return sum(node.op.name in ("linear", "matmul") for node in subject.graph.nodes)

    return fewer([(products("medium"), products("high"))], "products")


@probe()
def custom_pass(engine: str) -> Cell:
    """Nodes before and after a pass of the user that drops activations."""
    drop = [ml.rule(lambda x: ops.relu(x), lambda x: x, exact=False, name="drop")]

    def measure(network: Network) -> tuple[float, float]:
        options = {"optimization_level": "none"}
        return nodes(compiled(network, engine, **options)), nodes(
            compiled(network, engine, custom_passes=drop, **options)
        )

    return fewer(each(measure), "nodes")


@probe()
def verbose(engine: str) -> Cell:
    """Lines that a compilation prints about its steps and passes."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        compiled(MLP, engine, verbose=True)
    return when("linear-activation" in text.getvalue(), f"{len(text.getvalue().splitlines())} lines")


@probe()
def seven_steps(engine: str) -> Cell:
    """Graphs is_right by save_intermediates: one per step and pass."""
    stages = list(compiled(MLP, engine, save_intermediates=True).stages)
    return when(len(stages) > 3, f"{len(stages)} graphs, {', '.join(stages[:3])} to {stages[-1]}")


@probe()
def batch_hint(engine: str) -> Cell:
    """Rows that input_batch_size_range accepts and refuses."""
    network = Network(MLP.make, (32, 16))
    options = {"shapes": {"input": [None, 16]}, "hints": {"input_batch_size_range": (1, 32)}}
    subject = compiled(network, engine, **options)
    subject.bind(compiled(network, engine).randomize_params(seed=0))
    rows = [len(called(subject, network, n)) for n in (1, 32)]
    text = error(lambda: called(subject, network, 33))
    return when("33" in text, f"{rows[0]} and {rows[1]} rows run, 33 are an error")


@probe()
def priority_hint(engine: str) -> Cell:
    """Products of one operand with inference_priority latency and throughput."""

    def make() -> Any:
        model = m.Model()
        for name in "abc":
            model |= m.Linear(16, name=name)(input="input", output=name)
        model |= m.Add()(left="a", right="b", output="ab")
        model |= m.Add()(left="ab", right="c", output="output")
        return model

    def products(priority: str) -> int:
        subject = compiled(around(make, (32, 16)), engine, hints={"inference_priority": priority})
        return sum(node.op.name in ("linear", "matmul") for node in subject.graph.nodes)

    return fewer([(products("latency"), products("throughput"))], "products")


@probe()
def shapes_given(engine: str) -> Cell:
    """Programs before the first call, without and with shapes."""
    counts = [len(compiled(n, engine).programs) for n in NETWORKS]
    open_ = [len(compiled(n, engine, shapes={}).programs) for n in NETWORKS]
    return when(counts == [1, 1, 1] and open_ == [0, 0, 0], "1 program with shapes, 0 without")


@probe()
def static_shapes(engine: str) -> Cell:
    """Return errors of a call of another size, and of an open one."""
    observed = error(lambda: called(bound(MLP, engine, static_shapes=True), MLP, 4))
    unknown = error(lambda: compiled(MLP, engine, static_shapes=True, shapes={"input": [None, 16]}))
    return when("expected 8" in observed, f"{observed}; {unknown}")


@probe()
def static_types(engine: str) -> Cell:
    """Return a network that would promote a dtype."""

    def make() -> Any:
        model = m.Model()
        model |= m.Add()(left="input", right="other", output="output")
        return model

    options = {"shapes": {"input": [8, 16], "other": [8, 16]}, "types": {"other": ml.int32}}
    return refused_at(lambda: compiled(around(make), engine, static_types=True, **options), "static_types")


def refused_at(call: Any, words: str) -> Cell:
    text = error(call)
    return when(words in text, f"an error: {text}")


@probe()
def dynamic_shapes(engine: str) -> Cell:
    """Programs for calls of 1, 3 and 8 rows with an open batch, and the values of each."""
    for network in NETWORKS:
        subject = compiled(network, engine, shapes={"input": [None, *network.shape[1:]]})
        subject.bind(compiled(network, engine).randomize_params(seed=0))
        expected = called(subject, network, 8)
        for rows in (1, 3):
            part = np.asarray(subject.backend.to_numpy(subject({"input": network.input(8)[:rows]})["output"]))
            if not np.allclose(part, expected[:rows], rtol=1e-3, atol=1e-4):
                return when(False, f"other values with {rows} rows")
    count = len(subject.programs)
    return when(count == 1 or not subject.backend.capabilities.symbolic, f"{count} programs for 3 sizes")


@probe()
def target_tpu(engine: str) -> Cell:
    """Return a TPU as the target: JAX compiles for it and simulates it on this machine."""
    if engine == "jax":
        subject = bound(MLP, engine, target_hardware="tpu_v4", tpu_options={"simulate": True})
        return when(
            np.allclose(called(subject, MLP), called(bound(MLP, engine), MLP), atol=1e-2),
            "the simulated TPU computes the same; without simulate=True calls need one",
        )
    return refused(lambda: compiled(MLP, engine, target_hardware="tpu_v4", tpu_options={"replicas": 8}))


@probe()
def target_gpu(engine: str) -> Cell:
    """Return a GPU by name as the target, on this machine."""
    return refused_without_device(
        lambda: compiled(MLP, engine, target_hardware="nvidia_a100", optimize_for="throughput")
    )


@probe()
def vectorized_cpu(engine: str) -> Cell:
    """Vector statements of the program, with cpu_options vectorize off and on."""
    if engine != "c":
        return nothing(message(compiled(MLP, engine, cpu_options={"vectorize": False}), "cpu_options"))
    counts = [compiled(MLP, engine, cpu_options={"vectorize": on}).source.count("VECTOR(") for on in (False, True)]
    return when(counts[0] < counts[1], f"{counts[0]} to {counts[1]} vector statements")
