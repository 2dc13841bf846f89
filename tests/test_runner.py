"""Runners own the state of successive calls, on every backend."""

import tracemalloc

import numpy as np
import pytest

import mithril as ml
from mithril.models import MultiHeadAttention

BACKENDS = ["numpy", "jax", "torch", "mlx", "c", "ggml"]
TOKENS = np.random.default_rng(0).normal(size=(2, 6, 16)).astype(np.float32)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_runner_continues_forks_and_resets(backend):
    compiled = ml.compile(MultiHeadAttention(heads=2, cache=8), backend, inference=True)
    first, second = ({"query": TOKENS[:, k : k + 1], "position": np.int32(k)} for k in (0, 1))
    params = compiled.randomize_params(inputs=first)
    state = compiled.initial_state()
    expected = []
    for step in (first, second):
        outputs, state = compiled.evaluate(params, step, state=state)
        expected.append(compiled.backend.to_numpy(outputs["output"]))

    runner = compiled.runner(params)
    np.testing.assert_array_equal(compiled.backend.to_numpy(runner(first)["output"]), expected[0])
    swapped = runner.fork([1, 0])
    np.testing.assert_array_equal(compiled.backend.to_numpy(runner(second)["output"]), expected[1])
    step = {**second, "query": second["query"][::-1]}
    np.testing.assert_allclose(
        compiled.backend.to_numpy(swapped(step)["output"])[::-1], expected[1], rtol=1e-6, atol=1e-6
    )
    runner.reset()
    np.testing.assert_array_equal(compiled.backend.to_numpy(runner(first)["output"]), expected[0])


def decoder(backend, cache=512, heads=4, features=128):
    """Return a compiled layer with a cache of 512 positions, its parameters, and a function that makes steps."""
    shapes = {"query": [1, 1, features], "position": []}
    compiled = ml.compile(MultiHeadAttention(features, heads, cache=cache), backend, inference=True, shapes=shapes)
    tokens = np.random.default_rng(1).normal(size=(8, 1, 1, features)).astype(np.float32)
    return compiled, compiled.randomize_params(0), lambda k: {"query": tokens[k], "position": np.int32(k)}


def arrays(compiled, state):
    return {name: np.array(compiled.backend.to_numpy(x)) for name, x in state.items()}


def run(compiled, runner, *steps):
    return [np.array(compiled.backend.to_numpy(runner(step)["output"])) for step in steps]


def address(x):
    """Return the address of an array's memory."""
    if hasattr(x, "unsafe_buffer_pointer"):
        return x.unsafe_buffer_pointer()
    return x.data_ptr() if hasattr(x, "data_ptr") else x.ctypes.data


@pytest.mark.parametrize("backend", ["numpy", "jax", "torch", "c", "ggml"])
def test_caches_are_updated_in_place(backend):
    compiled, params, step = decoder(backend)
    runner = compiled.runner(params)
    addresses = []
    for k in range(4):
        runner(step(k))
        addresses.append({name: address(x) for name, x in runner._state.items()})
    assert all(a == addresses[0] for a in addresses)


@pytest.mark.parametrize("backend", ["numpy", "c", "ggml"])
def test_a_step_allocates_less_than_a_cache(backend):
    compiled, params, step = decoder(backend)
    runner = compiled.runner(params)
    run(compiled, runner, step(0), step(1))
    tracemalloc.start()
    runner(step(2))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 512 * 128 * 4 / 2, peak


def test_a_step_of_mlx_allocates_less_than_a_cache():
    mx = pytest.importorskip("mlx.core")
    compiled, params, step = decoder("mlx")
    runner = compiled.runner(params)
    run(compiled, runner, step(0), step(1))
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    run(compiled, runner, step(2))
    assert mx.get_peak_memory() - before < 512 * 128 * 4 / 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_does_not_read_unwritten_positions(backend):
    compiled, params, step = decoder(backend)
    runner = compiled.runner(params)
    expected = run(compiled, runner, step(0), step(1), step(2))
    runner.reset()
    run(compiled, runner, step(0))
    states = arrays(compiled, runner.state)
    for x in states.values():
        x[:, :, 256:] = np.nan
    runner._state = {name: compiled.backend.array(x) for name, x in states.items()}
    np.testing.assert_allclose(run(compiled, runner, step(1), step(2)), expected[1:], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_forks_states_and_calls_with_a_state_are_independent(backend):
    compiled, params, step = decoder(backend)
    runner = compiled.runner(params)
    expected = run(compiled, runner, *map(step, range(4)))
    runner.reset()
    run(compiled, runner, step(0))
    before, fork = runner.state, runner.fork()
    copy = arrays(compiled, before)
    np.testing.assert_array_equal(run(compiled, runner, step(1), step(2)), expected[1:3])
    for name, x in arrays(compiled, before).items():
        np.testing.assert_array_equal(x, copy[name])
    other = {**step(1), "query": -step(1)["query"]}
    first, _ = compiled.evaluate(params, other, state=before)
    again, _ = compiled.evaluate(params, other, state=before)
    np.testing.assert_array_equal(*(compiled.backend.to_numpy(r["output"]) for r in (first, again)))
    np.testing.assert_array_equal(run(compiled, fork, other)[0], compiled.backend.to_numpy(first["output"]))
    np.testing.assert_array_equal(run(compiled, runner, step(3))[0], expected[3])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rejected_call_keeps_the_state(backend):
    compiled, params, step = decoder(backend, cache=4)
    runner = compiled.runner(params)
    run(compiled, runner, step(0))
    before = arrays(compiled, runner.state)
    with pytest.raises(ml.InputError, match="holds 4 positions"):
        runner(step(4))
    for name, x in arrays(compiled, runner.state).items():
        np.testing.assert_array_equal(x, before[name])


def test_a_call_that_fails_while_it_runs_requires_a_reset(monkeypatch):
    compiled, params, step = decoder("numpy")
    runner = compiled.runner(params)
    (expected,) = run(compiled, runner, step(0))

    def fail(self, params, inputs):
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(type(compiled.programs[-1].executable), "__call__", fail)
        with pytest.raises(MemoryError):
            runner(step(1))
    with pytest.raises(ml.InputError, match="failed while it changed the state"):
        runner(step(1))
    runner.reset()
    np.testing.assert_array_equal(run(compiled, runner, step(0))[0], expected)


def test_optional_inputs_of_a_single_layer():
    compiled = ml.compile(MultiHeadAttention(heads=2), "numpy", inference=True)
    query = TOKENS[:, :3]
    params = compiled.randomize_params(inputs={"query": query})
    free = compiled.evaluate(params, {"query": query})["output"]
    mask = np.tril(np.ones((3, 3), bool))
    causal = compiled.evaluate(params, {"query": query, "mask": mask})["output"]
    assert not np.allclose(free[:, 0], causal[:, 0]) and np.allclose(free[:, 2], causal[:, 2], atol=1e-6)
    assert compiled.model.heads == 2


@pytest.mark.parametrize("backend", ["numpy", "jax", "torch", "c"])
def test_embedded_parameters_leave_the_cache_to_the_caller(backend):
    """Embed weights and statistics only: a cache that changes in every call stays a state."""
    compiled, params, step = decoder(backend, cache=8, features=32)
    shapes = {"query": [1, 1, 32], "position": []}
    fixed = ml.compile(
        MultiHeadAttention(32, 4, cache=8), backend, static_inference=True, inference=True, shapes=shapes
    )
    fixed.bind(params)
    expected = run(compiled, compiled.runner(params), *map(step, range(3)))
    results = run(fixed, fixed.runner(), *map(step, range(3)))
    np.testing.assert_allclose(results, expected, rtol=1e-5, atol=1e-5)
    assert fixed.programs[-1].interface.states
