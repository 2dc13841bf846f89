"""Every option of ``ml.compile`` on every backend: an effect that is observed, an error, or a decision that says so.

One row per option and value. ``EFFECT`` compares an observation with and without the option; ``SAYS`` looks for words
among the decisions; ``ERROR`` expects an error with these words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import mithril as ml
from mithril.compiler import option_rows
from mithril.models import Add, BatchNorm1d, Conv2d, Dropout, Linear, Model, Relu, Sigmoid

BACKENDS = ("numpy", "torch", "jax", "mlx", "c", "ggml")
X = np.random.default_rng(0).standard_normal((32, 16)).astype(np.float32)


def network() -> Model:
    model = Model()
    for name in ("query", "key", "value"):
        model |= Linear(16, name=name)(input="input", output=name)
    model |= Add()(left="query", right="key", output="pair")
    model |= Add()(left="pair", right="value", output="sum")
    model |= Relu(name="active")(input="sum", output="hidden")
    model |= Dropout(0.5, name="drop")(input="hidden", output="dropped")
    model |= Linear(16, name="first")(input="dropped", output="again")
    model |= BatchNorm1d(16, name="norm")(input="again", output="normed")
    model |= Linear(16, name="middle")(input="normed", output="more")
    model |= Relu(name="second")(input="more", output="nearly")
    model |= Linear(4, name="head")(input="nearly", output="output")
    return model


def compiled(backend: str, **options: Any) -> Any:
    return ml.compile(network(), backend, **{"shapes": {"input": [32, 16]}, **options})


# -- observations -------------------------------------------------------------------------------------------------
def pipeline(c: Any) -> Any:
    return str(c.pipeline)


def operations(c: Any) -> Any:
    return [node.op.name for node in c.programs[-1].graph.nodes]


def executed(c: Any) -> Any:
    return [(node.op.name, str(node.result.dtype)) for node in c.programs[-1].executable.graph.nodes]


def source(c: Any) -> Any:
    return c.source


def arena(c: Any) -> Any:
    return c.memory_report().workspace


def training(c: Any) -> Any:
    params = c.randomize_params(seed=0)
    c.evaluate(params, {"input": X}, np.ones((32, 4), np.float32))
    return executed(c)


def gradients(c: Any) -> Any:
    return sorted(c.evaluate(c.randomize_params(seed=0), {"input": X}, np.ones((32, 4), np.float32))[1])


def parameters(c: Any) -> Any:
    return c.backend.to_numpy(c.randomize_params()["head.weight"]).tobytes()


def precision(c: Any) -> Any:
    return str(c.get_types()["output"])


def outputs(c: Any) -> Any:
    return c.interface.output_names


def bound(c: Any) -> Any:
    c.bind(c.randomize_params(seed=0))
    c({"input": X})
    return len(c.programs[-1].interface.params)


def profiled(c: Any) -> Any:
    try:
        return bool(c.get_profile_stats())
    except ml.InputError:
        return None


def trained_with(c: Any) -> Any:
    """Return the operations of training, and the decisions: there may be nothing that could be forgotten."""
    return training(c), str(c.decisions)


def kept(c: Any) -> Any:
    return bool(c.stages)


@dataclass(frozen=True)
class EFFECT:
    observe: Callable[[Any], Any]


@dataclass(frozen=True)
class SAYS:
    words: str


@dataclass(frozen=True)
class ERROR:
    words: str


PYTHON = ("numpy", "torch", "jax", "mlx")
ARENA = ("c", "ggml")


def on(backends: tuple[str, ...], expected: Any, otherwise: Any = None) -> dict[str, Any]:
    """Return the expectation on some backends, and that on the others."""
    return {b: expected if b in backends else otherwise for b in BACKENDS}


def running(c: Any) -> Any:
    """Return the called object and the contents of its closure, which differ for each program."""
    call = c.programs[-1].executable.call
    captured = [cell.cell_contents for cell in getattr(call, "__closure__", None) or ()]
    return (
        [type(x).__name__ for x in (call, *captured)],
        str(getattr(call, "jitted", "")),
        str(getattr(call, "forward", "")),
    )


def only(backend: str, observe: Callable[[Any], Any], keyword: str) -> dict[str, Any]:
    """Expect an effect on one backend; the others name the backend that reads the option."""
    return on((backend,), EFFECT(observe), foreign(keyword, backend))


def foreign(keyword: str, readers: str) -> SAYS:
    return SAYS(f"reads the option {keyword}, which is for: {readers}")


EVERY = BACKENDS
ROWS: list[tuple[dict[str, Any], Mapping[str, Any]]] = [
    ({"optimization_level": "none"}, on(EVERY, EFFECT(operations))),
    ({"optimization_level": "none", "graph_optimization": True}, on(EVERY, EFFECT(pipeline))),
    ({"optimizations": {"fusion": False}}, on(EVERY, EFFECT(operations))),
    ({"optimizations": {"operator_fusion": False}}, on(EVERY, EFFECT(operations))),
    ({"optimizations": {"linear-activation": False}}, on(EVERY, EFFECT(operations))),
    ({"optimize_for": "throughput"}, on(EVERY, EFFECT(operations))),
    ({"hints": {"inference_priority": "throughput"}}, on(EVERY, EFFECT(operations))),
    ({"optimize_for": "latency"}, on(EVERY, SAYS("optimize_for='latency'"))),
    ({"inference": True}, on(EVERY, EFFECT(operations))),
    ({"static_inference": True}, on(EVERY, EFFECT(bound))),
    ({"memory_planning": False}, on(ARENA, EFFECT(arena), SAYS("has no arena"))),
    ({"memory_planning": "apart"}, on(ARENA, EFFECT(arena), SAYS("has no arena"))),
    ({"optimizations": {"memory_planning": False}}, on(ARENA, EFFECT(arena), SAYS("has no arena"))),
    ({"memory_planning": "gredy"}, on(EVERY, ERROR("did you mean 'greedy'"))),
    ({"max_memory_gb": "1kB"}, on(EVERY, ERROR("max_memory_gb allows 1 kB"))),
    ({"gradient_checkpointing": True, "checkpoint_segments": 2}, on(EVERY, EFFECT(trained_with))),
    ({"gradient_checkpointing": True, "inference": True}, on(EVERY, SAYS("computes no gradients"))),
    ({"mixed_precision": True}, on(EVERY, EFFECT(executed))),
    ({"precision": "bfloat16"}, on(EVERY, EFFECT(precision))),
    ({"precision": "float64"}, {**on(EVERY, EFFECT(precision)), "mlx": ERROR("does not support float64")}),
    ({"types": {"input": "float64"}}, {**on(EVERY, EFFECT(precision)), "mlx": ERROR("does not support float64")}),
    ({"trainable": ["head.*"]}, on(EVERY, EFFECT(gradients))),
    ({"outputs": ["hidden"]}, on(EVERY, EFFECT(outputs))),
    ({"seed": 3}, on(EVERY, EFFECT(parameters))),
    ({"constants": {"input": X}, "shapes": {}}, on(EVERY, EFFECT(lambda c: sorted(c.specs)))),
    ({"profile": True}, on(EVERY, EFFECT(profiled))),
    ({"save_intermediates": True}, on(EVERY, EFFECT(kept))),
    ({"custom_passes": [lambda graph: graph.replaced(name="mine")]}, on(EVERY, EFFECT(lambda c: c.graph.name))),
    ({"timeout": 1e-9}, on(EVERY, ERROR("timed out"))),
    ({"plugin_patience": 0}, on(EVERY, ERROR("above 0"))),
    ({"num_threads": 0}, on(EVERY, ERROR("at least 1"))),
    (
        {"num_threads": 2, "cpu_options": {"num_threads": 1}},
        on(EVERY, ERROR("set the same option to different values")),
    ),
    ({"cpu_options": {"vectorize": False}}, on(("c",), EFFECT(source), SAYS("cpu_options"))),
    ({"mobile_options": {"arch": "x86_64"}}, on(("c", "torch"), SAYS("x86_64"), foreign("mobile_options", "c, torch"))),
    ({"torch_options": {"enable_amp": True}}, only("torch", executed, "torch_options.enable_amp")),
    ({"torch_fx": True}, only("torch", running, "torch_fx")),
    ({"torch_options": {"graph_modes": True}}, on(EVERY, ERROR("did you mean 'graph_mode'"))),
    ({"xla_optimization_level": 0}, only("jax", running, "xla_optimization_level")),
    ({"jax_options": {"precision": "highest"}}, only("jax", running, "jax_options")),
    ({"pjit": True}, on(("jax",), SAYS("pjit=True: there is one device"), foreign("pjit", "jax"))),
    ({"parallelism": "data"}, on(("jax", "torch"), SAYS("device_mesh=(4,)"), SAYS("parallelism"))),
    ({"tpu_options": {"simulate": True}}, on(EVERY, SAYS("tpu_options"))),
    ({"target_hardware": "nosuch"}, on(EVERY, ERROR("nosuch"))),
    ({"target_hardware": "cpu"}, on(EVERY, SAYS("the backend compiles for its cpu in any case"))),
    (
        {"target_hardware": "mobile"},
        {**on(EVERY, ERROR("conflicts with the backend's device")), **on(("torch", "c"), SAYS("writes C for"))},
    ),
    ({"autodiff": "native"}, on(("torch", "jax"), EFFECT(training))),
    ({"hints": {"batch": 3}}, on(EVERY, ERROR("unknown key 'batch' of hints"))),
    ({"static_types": True}, on(EVERY, None)),
    ({"strict": True, "torch_fx": True}, {**on(EVERY, ERROR("strict=True: ignored")), "torch": None}),
]


def plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


CASES = [
    pytest.param(options, backend, expected[backend], id=f"{'-'.join(options)}-{k}-{backend}")
    for k, (options, expected) in enumerate(ROWS)
    for backend in BACKENDS
    if expected[backend] is not None
]


@pytest.mark.parametrize(("options", "backend", "expected"), CASES)
def test_an_option_does_what_its_row_says(options, backend, expected):
    if isinstance(expected, ERROR):
        with pytest.raises(ml.MithrilError, match=expected.words):
            compiled(backend, **options)
    elif isinstance(expected, SAYS):
        assert expected.words in str(compiled(backend, **options).decisions)
    else:
        base = {"optimization_level": "none"} if "graph_optimization" in options else {}
        with_option = expected.observe(compiled(backend, **options))
        assert plain(with_option) != plain(expected.observe(compiled(backend, **base)))


# Options whose effect is a file, a cache or another device have tests of their own.
ELSEWHERE = {
    "backend_map": "tests/compiled/test_partition.py",
    "cache": "tests/compiled/test_cache.py",
    "cache_dir": "tests/compiled/test_cache.py",
    "checks": "tests/compiled/test_checks.py",
    "checkpoint_policy": "plugins/mithril-passes/tests/test_checkpointing.py",
    "code_transformers": "test_files_of_each_kind_of_program and test_inserted_code_runs_at_each_call",
    "dump_format": "tests/test_promises.py",
    "dump_graph": "tests/test_promises.py",
    "dynamic_control_flow": "mithril-core/tests",
    "file_path": "test_files_of_each_kind_of_program",
    "fsdp_reshard": "plugins/mithril-tpu/tests/test_constraints.py",
    "intermediate_dir": "tests/test_promises.py",
    "jit": "the backends' test_running.py",
    "jit_options": "the backends' test_running.py",
    "max_programs": "tests/test_bounded_programs.py",
    "memory_format": "tests/test_memory_format.py",
    "pipeline_chunks": "plugins/mithril-parallel/tests",
    "pipeline_schedule": "plugins/mithril-parallel/tests",
    "pipeline_stages": "plugins/mithril-parallel/tests",
    "profile_output": "tests/test_promises.py",
    "quantization": "plugins/mithril-passes/tests/test_static_quantization.py",
    "quantization_aware": "plugins/mithril-train/tests/test_quantization.py",
    "scan_layers": "plugins/mithril-jax/tests/test_scanned_layers.py",
    "semantics": "tests/test_native_semantics.py",
    "shapes": "tests/compiled",
    "static_shapes": "mithril-core/tests",
    "template_path": "tests/test_promises.py",
    "tensor_split_dims": "plugins/mithril-parallel/tests",
    "torch_dynamo": "plugins/mithril-torch/tests/test_running.py",
    "tpu_replicas": "plugins/mithril-tpu/tests",
    "trace_shapes": "tests/compiled/test_observers.py",
    "vectorize": "plugins/mithril-jax/tests/test_options.py",
    "verbose": "tests/compiled/test_observers.py",
    "verify": "mithril-core/tests",
    "visualize": "tests/test_promises.py",
    "viz_options": "tests/test_promises.py",
}


def test_every_option_has_a_row():
    rows = {name for options, _ in ROWS for name in options} | ELSEWHERE.keys()
    first_party = {r["name"] for r in option_rows() if r["owner"].startswith("mithril-")}
    assert first_party - rows == set()
    assert rows - first_party == set()


# -- files --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("backend", PYTHON)
def test_files_of_each_kind_of_program(backend, tmp_path):
    path = tmp_path / "net.py"
    c = compiled(backend, file_path=path)
    forward = path.read_text()
    training(c)
    assert path.read_text() == forward
    assert "grad" in (tmp_path / "net.grad.py").read_text()


def test_files_that_wait_for_shapes_are_announced(tmp_path):
    c = compiled("numpy", shapes={}, file_path=tmp_path / "net.py", dump_graph=tmp_path / "graphs")
    assert "deferred: file_path, dump_graph" in str(c.decisions)
    c.evaluate(c.randomize_params(inputs={"input": X}), {"input": X})
    assert (tmp_path / "net.py").exists()


@pytest.mark.parametrize("backend", PYTHON)
def test_inserted_code_runs_at_each_call(backend, capsys):
    def speaking(code: str) -> str:
        head = "def forward(params, inputs):"
        return code.replace(head, f"{head}\n    print('called')")

    c = compiled(backend, code_transformers=[speaking])
    for _ in range(3):
        c.evaluate(c.randomize_params(seed=0), {"input": X})
    assert capsys.readouterr().out.count("called") == 3


# -- calls --------------------------------------------------------------------------------------------------------
def test_a_first_call_without_parameters_or_shapes():
    model = network()
    with pytest.raises(ml.InputError, match="no parameters are bound"):
        ml.compile(model, "numpy", strict=True)({"input": X})
    with pytest.raises(ml.InputError, match="no parameters are bound"):
        ml.compile(model, "numpy").evaluate({"input": X})
    with pytest.warns(ml.OptionWarning, match="no parameters are bound: using random parameters"):
        c = ml.compile(model, "numpy", profile=True)
        assert c({"input": X})["output"].shape == (32, 4)
    assert c.get_profile_stats()


@pytest.mark.parametrize(("priority", "programs"), [(None, 2), ("throughput", 2), ("latency", 4)])
def test_latency_rounds_no_batches_up(priority, programs):
    model = Model()
    model |= Linear(4)
    hints = {"input_batch_size_range": (1, 32)}
    c = ml.compile(model, "jax", shapes={"input": [None, 16]}, hints=hints, optimize_for=priority)
    params = c.randomize_params(seed=0)
    compiled_for = set()
    for rows in (3, 4, 7, 8):
        c.evaluate(params, {"input": np.ones((rows, 16), np.float32)})
        call = c.programs[-1].executable.call
        compiled_for.add(call.jitted._cache_size())
    assert max(compiled_for) == programs


@pytest.mark.parametrize(
    ("backend", "fused", "separate"),
    [
        ("c", "k0_conv_add_maximum(", "k0_conv("),
        ("torch", "relu=True)", "torch.relu(add)"),
    ],
)
def test_fusion_inside_backends_is_disabled(backend, fused, separate):
    """Compile at level "low", where no pass fuses and only the backend does, and at "none", where nothing does."""
    model = Model()
    model += Conv2d(4, kernel_size=3)
    model += Relu()
    texts = []
    fusing = [("low", {}), ("none", {"fusion": True})]
    for level, switches in (*fusing, ("none", {}), ("low", {"fusion": False}), ("low", {"operator_fusion": False})):
        options = {"optimization_level": level, "optimizations": switches}
        texts.append(ml.compile(model, backend, shapes={"input": [2, 3, 10, 10]}, **options).source)
    assert fused in texts[0] and fused in texts[1]
    for text in texts[2:]:
        assert fused not in text and separate in text


@pytest.mark.parametrize("backend", [name for name in PYTHON if name in BACKENDS])
def test_at_level_none_each_named_value_has_a_statement(backend):
    model = Model()
    model |= Conv2d(4, kernel_size=3)(input="input", output="convolved")
    model |= Relu()(input="convolved", output="active")
    model |= Sigmoid()(input="active", output="output")
    compiled = ml.compile(model, backend, shapes={"input": [2, 3, 10, 10]}, optimization_level="none")
    for name in ("convolved", "active", "output"):
        assert f"    {name} = " in compiled.source
