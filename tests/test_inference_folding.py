"""``inference=True`` computes expressions of bound parameters once, at ``bind``, on every backend."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest

import mithril as ml
from mithril import pass_
from mithril.compiler import CompiledModel
from mithril.models import BatchNorm2d, Conv2d, Flatten, GlobalAvgPool2d, Linear, Model, Relu

BACKENDS = ("numpy", "torch", "jax", "mlx", "c", "ggml")
SHAPES = {"input": [1, 4, 4, 4]}
OF_BATCH_NORM = {"batch_norm", "div", "mul", "rsqrt", "sqrt", "sub"}
RNG = np.random.default_rng(0)
X = {"input": RNG.standard_normal(SHAPES["input"]).astype(np.float32)}


def network() -> Model:
    """Return a network of which a call would scale more elements of the kernels than of the images."""
    model = Model()
    model |= Conv2d(4, 8, kernel_size=3, padding=1)
    model += BatchNorm2d(8)
    model += Relu()
    model += Conv2d(8, 8, kernel_size=3, bias=False)
    model += BatchNorm2d(8)
    model += GlobalAvgPool2d()
    model += Flatten()
    model += Linear(5)
    return model


def trained(compiled: CompiledModel, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return parameters and statistics that no initializer draws."""
    rng = np.random.default_rng(seed)

    def draw(arrays: dict[str, Any]) -> dict[str, Any]:
        return {n: rng.uniform(0.5, 1.5, np.shape(x)).astype(np.float32) for n, x in arrays.items()}

    params, state = draw(compiled.randomize_params()), draw(compiled.initial_state())
    array = compiled.backend.array
    return {n: array(x) for n, x in params.items()}, {n: array(x) for n, x in state.items()}


def output(compiled: CompiledModel, *arguments: Any, **options: Any) -> np.ndarray[Any, Any]:
    results = compiled.evaluate(*arguments, **options)
    outputs = results[0] if isinstance(results, tuple) else results
    return compiled.backend.to_numpy(outputs["output"])


def operations(compiled: CompiledModel) -> list[str]:
    return [node.op.name for node in compiled.programs[-1].executable.graph.nodes]


def expected(seed: int) -> np.ndarray[Any, Any]:
    plain = ml.compile(network(), "numpy", shapes=SHAPES)
    params, state = trained(plain, seed)
    return plain.backend.to_numpy(plain.evaluate(params, X, state=state)[0]["output"])


@pytest.mark.parametrize("backend", BACKENDS)
def test_batch_norms_leave_the_program_that_runs_bound_parameters(backend):
    compiled = ml.compile(network(), backend, shapes=SHAPES, inference=True)
    params, state = trained(compiled, seed=1)
    compiled.bind(params, state)
    for _ in range(3):  # the third call takes the fast path of repeated calls
        np.testing.assert_allclose(output(compiled, X), expected(1), rtol=1e-3)
    assert not OF_BATCH_NORM & {*operations(compiled)}
    assert any("bind computes" in d.message for d in compiled.decisions.of("choice"))
    compiled.bind(*trained(compiled, seed=2))
    for _ in range(3):
        np.testing.assert_allclose(output(compiled, X), expected(2), rtol=1e-3)
    assert len(compiled.programs) == 1  # ``bind`` builds no program again
    # Arguments of a call are those of this call.
    np.testing.assert_allclose(output(compiled, params, X, state=state), expected(1), rtol=1e-3)
    assert len(compiled.programs) == 2
    np.testing.assert_allclose(output(compiled, X, state=state), output(compiled, compiled.params, X, state=state))


@pytest.mark.parametrize(
    "options", [{"optimization_level": "none"}, {"optimizations": {"constant_folding": False}}, {"inference": False}]
)
def test_folding_is_switched_off(options):
    compiled = ml.compile(network(), "numpy", shapes=SHAPES, **{"inference": True, **options})
    compiled.bind(*trained(compiled, seed=1))
    np.testing.assert_allclose(output(compiled, X), expected(1), rtol=1e-3)
    assert len(compiled.programs) == 1


def test_a_model_without_expressions_of_parameters_gets_one_program():
    compiled = ml.compile(Model(Conv2d(4, 8, kernel_size=3), Relu()), "numpy", shapes=SHAPES, inference=True)
    compiled.bind(compiled.randomize_params())
    compiled(X)
    assert len(compiled.programs) == 1


@pytest.mark.parametrize("backend", ["numpy", "c", "jax"])
def test_a_cached_program_computes_the_weights_of_another_binding(backend, tmp_path):
    for seed in (1, 2):
        options = {"inference": True, "cache": True, "cache_dir": str(tmp_path)}
        compiled = ml.compile(network(), backend, shapes=SHAPES, **options)
        compiled.bind(*trained(compiled, seed))
        np.testing.assert_allclose(output(compiled, X), expected(seed), rtol=1e-3)
        assert not OF_BATCH_NORM & {*operations(compiled)}


def test_profiles_show_the_operations_that_run():
    compiled = ml.compile(network(), "numpy", shapes={"input": ["B", 4, 4, 4]}, inference=True)
    compiled.bind(*trained(compiled, seed=1))
    with ml.profile() as prof:
        np.testing.assert_allclose(output(compiled, X), expected(1), rtol=1e-3)
    summary = prof.summary()
    assert "conv" in summary and "rsqrt" not in summary
    assert compiled.memory_report(X).weights is not None


def test_transposed_weights_are_stored_once_per_binding():
    compiled = ml.compile(Model(Linear(8), Linear(8)), "numpy", shapes={"input": [2, 8]}, inference=True)
    compiled.bind(compiled.randomize_params(seed=0))
    compiled({"input": np.ones((2, 8), np.float32)})
    assert "transpose" not in operations(compiled)
    plain = ml.compile(Model(Linear(8), Linear(8)), "numpy", shapes={"input": [2, 8]})
    plain.bind(plain.randomize_params(seed=0))
    plain({"input": np.ones((2, 8), np.float32)})
    assert "transpose" in operations(plain)


def test_a_mesh_keeps_parts_of_weights():
    class Divided(ml.NumpyBackend):
        def has_whole_parameters(self, options: Any) -> bool:
            return False

    compiled = ml.compile(network(), Divided(), shapes=SHAPES, inference=True)
    compiled.bind(*trained(compiled, seed=1))
    compiled(X)
    assert len(compiled.programs) == 1


def test_arrays_of_numpy_are_converted_when_they_are_bound():
    compiled = ml.compile(network(), "torch", shapes=SHAPES, inference=True)
    arrays = [{n: compiled.backend.to_numpy(x) for n, x in part.items()} for part in trained(compiled, seed=1)]
    compiled.bind(*arrays)
    np.testing.assert_allclose(output(compiled, X), expected(1), rtol=1e-3)
    assert len(compiled.programs) == 1
    wrong = {**arrays[0], "linear.bias": np.zeros(6, np.float32)}
    with pytest.raises(ml.InputError, match="'linear.bias' has shape"):
        compiled.bind(wrong)
    with pytest.raises(ml.InputError, match="the state does not match the model"):
        compiled.bind(arrays[0], {})


@pytest.mark.parametrize("backend", ["numpy", "c"])  # C has a path of its own for repeated calls
def test_replaced_entries_of_the_bound_parameters_count(backend):
    compiled = ml.compile(network(), backend, shapes=SHAPES, inference=True).bind(*_trained_numpy())
    params, (replacements, _) = compiled.params, trained(compiled, seed=2)
    for name in ("linear.bias", "linear.weight", "conv2d.weight"):
        for _ in range(3):
            output(compiled, X)
        params[name] = replacements[name]
        plain = ml.compile(network(), "numpy", shapes=SHAPES)
        expected_output = output(plain, params, X, state=_trained_numpy()[1])
        for _ in range(3):
            np.testing.assert_allclose(output(compiled, X), expected_output, rtol=1e-3)
    params["linear.bias"] = np.zeros(6, np.float32)
    with pytest.raises(ml.InputError, match="'linear.bias' has shape"):
        compiled(X)


@pytest.mark.parametrize("backend", ["numpy", "c"])
def test_programs_of_several_sizes_share_the_weights_of_a_binding(backend):
    compiled = ml.compile(Model(Linear(64), Relu(), Linear(64)), backend, inference=True)
    compiled.bind(ml.compile(compiled.model, backend, shapes={"input": [8, 64]}).randomize_params())
    for rows in (8, 16):
        compiled({"input": np.ones((rows, 64), np.float32)})
    first, second = (p.weights for p in compiled.programs)
    assert all(first[name] is second[name] for name in first)


def test_c_holds_packed_copies_alone():
    """Neither the results of expressions that only packed copies are made of, nor copies of old bindings, stay."""
    compiled = ml.compile(network(), "c", shapes={"input": [1, 4, 16, 16]}, inference=True)
    copies = []
    for seed in (1, 2):
        compiled.bind(*trained(compiled, seed))
        compiled({"input": np.ones((1, 4, 16, 16), np.float32)})
        (program,) = compiled.programs
        packed = [x for x in program.weights.values() if x.size >= 8 * 4 * 9]
        assert [x.ndim for x in packed] == [1, 1]
        copies += map(weakref.ref, packed)
        del packed
    assert not program.request.bound.computed
    assert [copy() is None for copy in copies] == [True, True, False, False]


def test_a_state_with_the_bound_statistics_runs_the_folded_program():
    compiled = ml.compile(network(), "numpy", shapes=SHAPES, inference=True).bind(*_trained_numpy())
    np.testing.assert_allclose(output(compiled, X, state=compiled.initial_state()), expected(1), rtol=1e-3)
    assert len(compiled.programs) == 1


def _trained_numpy() -> tuple[dict[str, Any], dict[str, Any]]:
    return trained(ml.compile(network(), "numpy", shapes=SHAPES), seed=1)


def test_parts_on_another_backend_read_weights_in_their_plain_form():
    model = network()
    model.set_attribute("backend", "other")
    compiled = ml.compile(model, "torch", shapes=SHAPES, inference=True, backend_map={"other": ml.JaxBackend()})
    compiled.bind(*trained(compiled, seed=1))
    np.testing.assert_allclose(output(compiled, X), expected(1), rtol=1e-3)


def test_files_of_gguf_have_the_parameters_of_the_model(tmp_path):
    compiled = ml.compile(network(), "ggml", shapes=SHAPES, inference=True)
    compiled.bind(*trained(compiled, seed=1))
    expected_output = output(compiled, X)
    compiled.export(tmp_path / "model.gguf")
    loaded = ml.load(tmp_path / "model.gguf")
    np.testing.assert_allclose(output(loaded, X), expected_output, rtol=1e-3)


@pytest.mark.parametrize("way", ["inference", "static_inference"])
def test_options_that_the_backend_refuses_are_refused_at_once(way):
    options = {way: True, "cpu_options": {"cpu": "znver55"}}
    with pytest.raises(ml.OptionError, match="unknown CPU 'znver55' in cpu_options"):
        ml.compile(network(), "c", shapes=SHAPES, **options)


@pytest.mark.parametrize(("model", "is_folded"), [(network(), True), (Model(Relu(), Relu()), False)])
def test_the_passes_run_once_for_the_first_program(model, is_folded):
    runs = []

    def counting(graph: Any) -> Any:
        runs.append(graph)
        return graph

    compiled = ml.compile(model, "numpy", shapes=SHAPES, inference=True, custom_passes=[counting])
    compiled.bind(compiled.randomize_params(seed=0))
    output(compiled, X)
    assert any("bind computes" in d.message for d in compiled.decisions) == is_folded
    assert len(runs) == len(compiled.programs) == 1


def test_a_cached_program_has_the_decisions_of_its_passes(tmp_path):
    def deciding(graph: Any, context: Any) -> Any:
        context.decisions.record("choice", "a decision of a pass")
        return graph

    one = pass_(name="deciding")(deciding)
    for _ in range(2):
        compiled = ml.compile(
            network(), "numpy", shapes=SHAPES, inference=True, cache=True, cache_dir=str(tmp_path), custom_passes=[one]
        )
        compiled.bind(*trained(compiled, seed=1))
        output(compiled, X)
        assert "a decision of a pass" in str(compiled.decisions)


@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_of_16_bits_are_folded(backend):
    compiled = ml.compile(network(), backend, shapes=SHAPES, types={"input": "bfloat16"}, inference=True)
    reference = ml.compile(network(), backend, shapes=SHAPES, types={"input": "bfloat16"}, optimization_level="none")
    params = compiled.randomize_params(seed=0)
    x = {"input": X["input"].astype(ml.bfloat16.numpy)}
    expected = compiled.backend.to_numpy(reference.evaluate(params, x)["output"]).astype(np.float32)
    result = compiled.backend.to_numpy(compiled.bind(params)(x)["output"]).astype(np.float32)
    np.testing.assert_allclose(result, expected, atol=0.03)
