"""Many devices on JAX: data, model, fsdp, pipelines and their products equal one device, forward and backward."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest
from gpt import gpt
from small_models import block

import mithril as ml
from mithril.compiler import ProgramKey, ProgramKind
from mithril.models import (
    Conv2d,
    Dropout,
    IOKey,
    LayerNorm,
    Linear,
    MixtureOfExperts,
    Model,
    MultiHeadAttention,
    Relu,
)
from mithril_jax import lowering
from mithril_jax.mesh.mesh_execution import SMALLEST_DIVIDED, explained
from mithril_tpu.aot import analysis

SHAPES = {"x": [8, 6, 16]}
X = {"x": np.random.default_rng(0).standard_normal((8, 6, 16), np.float32)}
G = np.random.default_rng(1).standard_normal((8, 6, 16), np.float32)


def model():
    return block(16, 4, 32)


def stepped(backend, **options):
    compiled = ml.compile(model(), backend, shapes=SHAPES, **options)
    params = compiled.randomize_params(0)
    return compiled, params, compiled.evaluate(params, X, G)


@pytest.fixture(scope="module")
def one():
    return stepped(ml.JaxBackend())[2]


def assert_same(actual, expected):
    for left, right in zip(actual, expected, strict=True):
        assert left.keys() == right.keys()
        for name in right:
            np.testing.assert_allclose(left[name], right[name], rtol=1e-4, atol=1e-5, err_msg=name)


WAYS = {
    "data": ((4,), {}),
    "model": ((1, 4), {}),
    "both": ((2, 2), {}),
    "fsdp": ((4,), {"parallelism": "fsdp"}),
    "fsdp and model": ((2, 2), {"parallelism": "fsdp"}),
    "pipeline": ((1, 1, 4), {"pipeline_chunks": 4}),
    "gpipe": ((1, 1, 2), {"pipeline_chunks": 2, "pipeline_schedule": "gpipe"}),
    "a mesh of stages": ((2,), {"parallelism": "pipeline"}),
    "stages of a mesh": ((4,), {"parallelism": "pipeline", "pipeline_stages": 2, "pipeline_chunks": 2}),
    "all": ((2, 2, 2), {"pipeline_chunks": 2}),
    "fully sharded stages": ((2, 1, 2), {"pipeline_chunks": 2, "parallelism": "fsdp"}),
}


QUICK = ("data", "fsdp", "pipeline", "all", "fully sharded stages")


@pytest.mark.parametrize("way", [way if way in QUICK else pytest.param(way, marks=pytest.mark.slow) for way in WAYS])
def test_mesh_equals_one_device(way, one):
    mesh, options = WAYS[way]
    compiled, params, results = stepped(ml.JaxBackend(device_mesh=mesh), **options)
    assert_same(results, one)
    # gradients have the shardings of their parameters
    updated = {name: p - 0.1 * results[1][name] for name, p in params.items()}
    compiled.evaluate(updated, X, G)


@pytest.mark.parametrize("way", ["fsdp and model", "all"])
def test_attention_in_blocks_is_divided(way, one, monkeypatch):
    monkeypatch.setattr(lowering, "LONG", 0)
    mesh, options = WAYS[way]
    compiled, _, results = stepped(ml.JaxBackend(device_mesh=mesh), **options)
    assert "blocked_attention_grad(" in compiled.source
    assert_same(results, one)


def test_positions_in_parts_equal_one_device():
    """Pass keys around a ring; masks count the positions of the whole sequence."""
    x, settings = IOKey("x"), {"causal": True, "kv_heads": 2}
    h = x + Dropout(0.2)(MultiHeadAttention(16, 4, **settings, name="attn")(LayerNorm(16, name="norm")(x)))
    network = Model.create(outputs={"y": Linear(16, name="last")(h)})
    inputs = {"x": np.random.default_rng(0).standard_normal((2, 16, 16), np.float32)}
    cotangent, results = np.random.default_rng(1).standard_normal((2, 16, 16), np.float32), []
    for backend, options in ((ml.JaxBackend(), {}), (ml.JaxBackend(device_mesh=(2, 2)), {"parallelism": "context"})):
        compiled = ml.compile(network, backend, shapes={"x": [2, 16, 16]}, **options)
        params, state = compiled.randomize_params(0), compiled.initial_state(7)
        results.append(compiled.evaluate(params, inputs, cotangent, state=state)[:2])
    assert_same(results[1], results[0])
    call = compiled.programs[-1].executable.call
    call = getattr(call, "jitted_call", call)
    arguments = {n: call.shardings.place(n, v, keep=False) for n, v in {**inputs, "grad/y": cotangent, **state}.items()}
    kinds = analysis.collectives(call.lower(call.placed(params), arguments).compile().as_text())
    assert "all-gather" not in kinds, "no device has all positions"
    # Each device sends 2 heads of 8 positions, for the forward pass, for the sums of its gradient, and with
    # cotangents: 2 + 2 + 4 arrays, twice at most.
    assert kinds["collective-permute"].bytes <= 2 * 8 * (2 * 8 * 4 * 4)


@pytest.mark.slow
def test_pipeline_without_a_mesh_uses_the_available_devices(one):
    compiled, _, results = stepped(ml.JaxBackend(), pipeline_stages=2)
    assert_same(results, one)
    assert "2 pipeline stages" in str(compiled.decisions)


@lru_cache
def placed(way):
    mesh, options = WAYS[way]
    compiled, params, _ = stepped(ml.JaxBackend(device_mesh=mesh), **options)
    call = compiled.programs[-1].executable.call
    arrays = call.placed(params)
    return compiled, arrays, compiled.evaluate(arrays, X, G)[1]


def parts_of(x, number):
    """Return the parts that an array has: small ones are not divided."""
    return number if x.size >= SMALLEST_DIVIDED else 1


def test_fully_sharded_parameters_and_gradients_are_in_parts():
    _, arrays, gradients = placed("fsdp")
    for name in arrays:
        x = arrays[name]
        assert x.addressable_shards[0].data.size * parts_of(x, 4) == x.size
        assert gradients[name].sharding == arrays[name].sharding


def test_parameters_of_a_pipeline_are_in_parts_between_steps():
    """Exchange parts for the complete parameters of each stage, and its gradients for parts."""
    _, arrays, gradients = placed("pipeline")
    for name, x in arrays.items():
        assert x.addressable_shards[0].data.size * parts_of(x, 4) == x.size
        assert gradients[name].sharding == x.sharding
    assert any(parts_of(x, 4) == 4 for x in arrays.values())
    counts = collectives("pipeline")
    assert counts["all-to-all"] >= 4
    small = sum(parts_of(x, 4) == 1 for x in arrays.values())
    assert counts.get("all-gather", 0) <= 1 + small, "only small parameters, which stay whole, are gathered"


def collectives(way):
    compiled, arrays, _ = placed(way)
    program = compiled.programs[-1].executable.call
    inputs = {**X, "grad/y": G}
    lowered = program.lower(arrays, {n: program.shardings.place(n, x, keep=False) for n, x in inputs.items()})
    text = lowered.compile().as_text()
    return {kind: collective.count for kind, collective in analysis.collectives(text).items()}


def test_meshes_have_the_expected_collectives():
    assert collectives("data").keys() == {"all-reduce"}
    model = collectives("model")
    assert model.keys() == {"all-reduce"}
    assert model["all-reduce"] <= 4  # Megatron: one after attention and one after the perceptron, each way
    assert collectives("fsdp")["all-gather"] >= 1


@pytest.mark.parametrize(("layers", "schedule"), [(3, "1f1b"), (2, "gpipe")])
def test_unequal_stages_tied_weights_and_dropout_equal_one_device(layers, schedule):
    """Read a table in the first stage and in the last; masks depend on the position in the whole batch."""
    network = gpt(32, 8, layers=layers, heads=4, features=16, dropout=0.3)
    x = {"input": np.random.default_rng(0).integers(0, 32, (8, 8)).astype(np.int32)}
    g = np.random.default_rng(1).standard_normal((8, 8, 32), np.float32)
    results = []
    for mesh, options in ((None, {}), ((2, 1, 2), {"pipeline_chunks": 4, "pipeline_schedule": schedule})):
        backend = ml.JaxBackend(device_mesh=mesh)
        compiled = ml.compile(network, backend, shapes={"input": [8, 8]}, **options)
        params = compiled.randomize_params(0)
        results.append(compiled.evaluate(params, x, g, state=compiled.initial_state(0))[:2])
    assert_same(results[1], results[0])


def test_1f1b_saves_the_activations_of_fewer_chunks():
    def temporaries(schedule):
        options = {"pipeline_chunks": 16, "pipeline_schedule": schedule}
        h = Linear(16, name="second")(Relu()(Linear(32, name="first")(IOKey("x"))))
        network, backend = Model.create(outputs={"y": h}), ml.JaxBackend(device_mesh=(1, 1, 2))
        compiled = ml.compile(network, backend, shapes={"x": [1024, 16]}, **options)
        key = ProgramKey(compiled.programs[0].request.types, ProgramKind(True, ("y",)))
        call = compiled.compiler.specialize(key).executable.call
        x = np.ones((1024, 16), np.float32)
        lowered = call.lower(call.placed(compiled.randomize_params(0)), {"x": x, "grad/y": x})
        return lowered.compile().memory_analysis().temp_size_in_bytes

    assert temporaries("1f1b") < 0.6 * temporaries("gpipe")


def test_fully_sharded_training_equals_one_device():
    pytest.importorskip("mithril_train")
    losses = []
    for backend, options in ((ml.JaxBackend(), {}), (ml.JaxBackend(device_mesh=(4,)), {"parallelism": "fsdp"})):
        compiled = ml.compile(model(), backend, shapes=SHAPES, **options)
        trainer = ml.Trainer(compiled, ml.Adam(0.01), loss="mse_loss", progress=False)
        losses.append([trainer.step({**X, "target": G})["loss"] for _ in range(3)])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)


@pytest.mark.parametrize(
    ("mesh", "options", "message"),
    [
        ((1, 1, 2), {"pipeline_stages": 3}, "conflicts with device_mesh"),
        ((1, 1, 2), {"parallelism": "data"}, "conflicts with a pipeline"),
        (
            (4,),
            {"parallelism": "pipeline", "pipeline_stages": 3},
            "cannot be divided into 3 stages(.|\n)*hint",
        ),
        ((2, 2), {"pipeline_stages": 2}, r"does not tell how many(.|\n)*hint: use device_mesh=\(2, 2, 2\), .*=\(4,\)"),
        ((1, 1, 2), {"pipeline_chunks": 0}, "expected int of at least 1, got 0"),
        ((1, 1, 2), {"pipeline_chunks": 3}, "cannot be cut into 3 chunks"),
        ((4,), {"parallelism": "context"}, "parallelism='context' requires a mesh with a second axis"),
        ((2, 2), {"parallelism": "context", "tensor_split_dims": {"weights": 0}}, "tensor_split_dims conflicts with"),
    ],
)
def test_invalid_meshes_are_rejected(mesh, options, message):
    with pytest.raises(ml.OptionError, match=message):
        ml.compile(model(), ml.JaxBackend(device_mesh=mesh), shapes=SHAPES, **options)


@pytest.mark.parametrize(
    ("requested", "split", "unsplit"),
    [
        ({}, {"body.weight": 0, "head.weight": 1}, {"odd.weight": "axis 0 of length 9"}),
        ({"weights": 0}, {"body.weight": 0}, {"odd.weight": "axis 0 of length 9", "head.weight": "axis 0 of length 7"}),
        ({"head.*": 0}, {}, {"head.weight": "axis 0 of length 7", "head.bias": "axis 0 of length 7"}),
        ({"body.weight": 1, "body.bias": 0}, {"body.bias": 0}, {"body.weight": "axis 1 of length 9"}),
    ],
)
def test_requested_axes_are_split_or_reported(requested, split, unsplit):
    """Splits by group, by pattern and by name; the default splits pairs of weights by columns, then rows."""
    h = Linear(12, name="body")(Linear(9, name="odd")(IOKey("x")))
    network = Model.create(outputs={"y": Linear(7, name="head")(h)})
    backend = ml.JaxBackend(device_mesh=(1, 2))
    options = {"tensor_split_dims": requested} if requested else {}
    compiled = ml.compile(network, backend, shapes={"x": [4, 10]}, **options)
    messages = [line for line in map(str, compiled.decisions) if "is replicated" in line]
    assert sorted(messages) == sorted(
        f"choice: '{name}' is replicated: {reason} cannot be divided by 2" for name, reason in unsplit.items()
    )
    call = compiled.programs[-1].executable.call
    splits = {n: tuple(s) for n, s in call.shardings.specs.items()}
    model_axes = {name: s.index("model") for name, s in splits.items() if "model" in s}
    assert split.items() <= model_axes.items()
    assert not unsplit.keys() & model_axes.keys()
    if requested:
        assert model_axes == split


@pytest.mark.parametrize(
    ("mesh", "layers", "options"),
    [((4,), 1, {}), ((2, 1, 2), 2, {"pipeline_chunks": 2})],
    ids=["data", "pipeline"],
)
def test_devices_compute_experts_for_their_own_rows(mesh, layers, options):
    experts = Model()
    for k in range(layers):
        experts += MixtureOfExperts(4, 12, active=2, gated=False, name=f"m{k}")
    x, cotangent = np.random.default_rng(0).standard_normal((2, 8, 3, 16), np.float32)
    results = []
    for backend, settings in ((ml.JaxBackend(), {}), (ml.JaxBackend(device_mesh=mesh), options)):
        compiled = ml.compile(experts, backend, shapes={"input": list(x.shape)}, **settings)
        results.append(compiled.evaluate(compiled.randomize_params(0), {"input": x}, cotangent))
    assert_same(results[1], results[0])
    assert "expert_matmul_by_device(" in compiled.programs[-1].executable.source


def test_native_gradients_reject_a_pipeline():
    compiled = ml.compile(
        model(), ml.JaxBackend(device_mesh=(1, 1, 2)), shapes=SHAPES, autodiff="native", inference=False
    )
    with pytest.raises(ml.OptionError, match="conflicts with a pipeline"):
        compiled.evaluate(compiled.randomize_params(0), X, G)


def bound_on_two_devices(model, shape, requested):
    """Return a program that holds random weights, divided as requested, and the weights by name."""
    options = {"static_inference": True, "tensor_split_dims": requested}
    compiled = ml.compile(model, ml.JaxBackend(device_mesh=(1, 2)), shapes={"input": shape}, **options)
    shapes = {name: x.shape for name, x in compiled.randomize_params(0).items()}
    weights = {name: np.random.default_rng(0).random(s, np.float32) for name, s in shapes.items()}
    return compiled, compiled.bind(weights), weights


@pytest.mark.parametrize(("group", "axis"), [("weights", 0), ("weights", -1), ("weight", 0), ("weight", 1)])
def test_a_mesh_divides_the_weights_that_a_program_holds(group, axis):
    """Count axes of the parameter, although the program holds it transposed."""
    compiled, program, weights = bound_on_two_devices(Linear(4096, bias=False), [4, 256], {group: axis})
    x = np.ones((4, 256), np.float32)
    np.testing.assert_allclose(program({"input": x})["output"], x @ weights["weight"].T, rtol=1e-4)
    (weight,) = compiled.programs[-1].executable.call.weights.values()
    assert weight.shape == (256, 4096)
    assert weight.sharding.shard_shape(weight.shape) == ((256, 2048) if axis == 0 else (128, 4096))


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ((2, 2), {}),
        ((1, 2), {"static_inference": True}),
        ((4,), {"parallelism": "fsdp"}),
        ((1, 1, 2), {"pipeline_chunks": 2}),
    ],
    ids=["model axis", "held weights", "fully sharded", "pipeline"],
)
def test_a_cached_program_is_divided_as_before(tmp_path, mesh, options):
    pair = Model()  # weights are divided along their shorter axis, so that one sum combines both products
    pair += Linear(128, name="down")
    pair += Linear(256, name="up")
    results = []
    for _ in range(2):
        backend = ml.JaxBackend(device_mesh=mesh)
        cached = {"cache": True, "cache_dir": str(tmp_path)}
        compiled = ml.compile(pair, backend, shapes={"input": [4, 256]}, **options, **cached)
        compiled.bind({name: np.asarray(x) for name, x in compiled.randomize_params(0).items()})
        y = compiled({"input": np.ones((4, 256), np.float32)})["output"]
        call = compiled.programs[-1].executable.call
        results.append((np.asarray(y), getattr(call, "jitted_call", call).shardings.specs))
        assert not [line for line in map(str, compiled.decisions) if "recompiled" in line]
    np.testing.assert_array_equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


@pytest.mark.parametrize("options", [{"pipeline_chunks": 2}, {}], ids=["chunks", "one chunk"])
def test_stages_are_cut_for_each_size_of_a_batch(options):
    """Compile for symbolic sizes, which a pipeline cannot run."""
    network = Linear(8, name="second")(Relu()(Linear(16, name="first")(IOKey("x"))))
    model = Model.create(outputs={"y": network})
    compiled = ml.compile(model, ml.JaxBackend(device_mesh=(1, 1, 2)), shapes={"x": [None, 16]}, **options)
    params = compiled.randomize_params(0)
    expected = ml.compile(model, "numpy").evaluate(params, {"x": X["x"][0]})
    for rows in (6, 4):
        results = compiled.evaluate(params, {"x": X["x"][0, :rows]})
        np.testing.assert_allclose(results["y"], expected["y"][:rows], rtol=1e-5)
    assert "a pipeline is cut into stages for each size" in str(compiled.decisions)


def test_a_mesh_holds_weights_of_64_bits():
    backend = ml.JaxBackend(device_mesh=(1, 2), dtype="float64")
    compiled = ml.compile(Linear(256, bias=False), backend, shapes={"input": [4, 256]}, static_inference=True)
    weight = np.random.default_rng(0).random((256, 256))
    x = np.ones((4, 256))
    np.testing.assert_allclose(compiled.bind({"weight": weight})({"input": x})["output"], x @ weight.T, rtol=1e-12)


def test_weights_that_a_program_embeds_are_not_divided():
    """Report the pattern: small weights and biases are literals of the program."""
    compiled, program, weights = bound_on_two_devices(Linear(4096), [4, 256], {"bias": 0, "weight": 0})
    x = np.ones((4, 256), np.float32)
    expected = x @ weights["weight"].T + weights["bias"]
    np.testing.assert_allclose(program({"input": x})["output"], expected, rtol=1e-4)
    (ignored,) = [line for line in map(str, compiled.decisions) if "tensor_split_dims" in line]
    reason = "'bias' matches no weight that the program holds as an argument; each device has all embedded ones"
    assert ignored == f"ignored: tensor_split_dims: {reason}"


def test_axes_of_kernels_that_a_program_holds_are_those_of_the_parameter():
    """Divide or report axes of [outputs, inputs, height, width]; the program holds the outputs last."""
    model = Model()
    model += Conv2d(64, 96, 3, groups=2, bias=False, name="c")
    model += Conv2d(96, 64, 3, bias=False, name="d")
    compiled, program, _ = bound_on_two_devices(model, [1, 64, 9, 9], {"c.weight": 0, "d.weight": 2})
    program({"input": np.ones((1, 64, 9, 9), np.float32)})
    weights = compiled.programs[-1].executable.call.weights
    parts = {name: x.sharding.shard_shape(x.shape) for name, x in weights.items()}
    assert parts == {"c.weight": (3, 3, 32, 48), "d.weight": (3, 3, 96, 64)}
    messages = [line for line in map(str, compiled.decisions) if "is replicated" in line]
    assert messages == ["choice: 'd.weight' is replicated: axis 2 of length 3 cannot be divided by 2"]
    with pytest.raises(ml.OptionError, match=r"'c.weight' has no axis 4(.|\n)*\[96, 32, 3, 3\]"):
        bound_on_two_devices(model, [1, 64, 9, 9], {"c.weight": 4})[1]({"input": np.ones((1, 64, 9, 9), np.float32)})


def test_errors_of_collectives_name_the_reason():
    text = "UNKNOWN: Gloo AllGather failed: Connection reset by peer"
    with pytest.raises(ml.BackendError, match="another process of this program has exited"), explained(is_remote=True):
        raise ValueError(text)
    with pytest.raises(ValueError, match="Gloo"), explained(is_remote=False):
        raise ValueError(text)
