"""Runners own the state of successive calls, on every backend."""

import tracemalloc

import numpy as np
import pytest

import mithril as ml
from mithril import ops
from mithril.models import BatchNorm1d, Linear, MultiHeadAttention, Sequential

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


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_runner_reads_the_bound_statistics(backend):
    compiled = ml.compile(Sequential(Linear(4), BatchNorm1d()), backend, shapes={"input": [3, 4]})
    x = {"input": TOKENS[0, :3, :4]}
    params, state = compiled.randomize_params(0), compiled.initial_state(0)
    compiled.bind(params, {name: compiled.backend.array(np.asarray(s) + 0.5) for name, s in state.items()})
    expected = compiled.backend.to_numpy(compiled(x)["output"])
    runner = compiled.runner()
    for _ in range(2):
        np.testing.assert_array_equal(compiled.backend.to_numpy(runner(x)["output"]), expected)
    assert not np.array_equal(compiled.backend.to_numpy(compiled.runner(seed=0)(x)["output"]), expected)
    np.testing.assert_array_equal(compiled.backend.to_numpy(compiled(x)["output"]), expected)


def decoder(backend, cache=512, heads=4, features=128):
    """Return a compiled layer with a cache of 512 positions, its parameters, and a function that makes steps."""
    shapes = {"query": [1, 1, features], "position": []}
    compiled = ml.compile(MultiHeadAttention(features, heads, cache=cache), backend, inference=True, shapes=shapes)
    tokens = np.random.default_rng(1).normal(size=(8, 1, 1, features)).astype(np.float32)
    return compiled, compiled.randomize_params(0), lambda k: {"query": tokens[k], "position": np.int32(k)}


STARTS = np.array([0, 3, 300], np.int32)


def rows_decoder(backend, cache=512, features=64):
    """Return the same for three rows of a batch, each at its own position: 0, 3 and 300 in the first step."""
    shapes = {"query": [3, 1, features], "position": [3]}
    model = MultiHeadAttention(features, 2, cache=cache, rotary=True)
    compiled = ml.compile(model, backend, inference=True, shapes=shapes)
    tokens = np.random.default_rng(1).normal(size=(8, 3, 1, features)).astype(np.float32)
    return compiled, compiled.randomize_params(0), lambda k: {"query": tokens[k], "position": STARTS + np.int32(k)}


def arrays(compiled, state):
    return {name: np.array(compiled.backend.to_numpy(x)) for name, x in state.items()}


def run(compiled, runner, *steps):
    return [np.array(compiled.backend.to_numpy(runner(step)["output"])) for step in steps]


def address(x):
    """Return the address of an array's memory."""
    if hasattr(x, "unsafe_buffer_pointer"):
        return x.unsafe_buffer_pointer()
    return x.data_ptr() if hasattr(x, "data_ptr") else x.ctypes.data


@pytest.mark.parametrize("decoder", [decoder, rows_decoder])
@pytest.mark.parametrize("backend", ["numpy", "jax", "torch", "c", "ggml"])
def test_caches_are_updated_in_place(backend, decoder):
    compiled, params, step = decoder(backend)
    runner = compiled.runner(params)
    addresses = []
    for k in range(4):
        runner(step(k))
        addresses.append({name: address(x) for name, x in runner._state.items()})
    assert all(a == addresses[0] for a in addresses)


@pytest.mark.parametrize("decoder", [decoder, rows_decoder])
@pytest.mark.parametrize("backend", ["numpy", "c", "ggml"])
def test_a_step_allocates_less_than_a_cache(backend, decoder):
    compiled, params, step = decoder(backend)
    runner = compiled.runner(params)
    run(compiled, runner, step(0), step(1))
    tracemalloc.start()
    runner(step(2))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 512 * 128 * 4 / 2, peak


@pytest.mark.parametrize("decoder", [decoder, rows_decoder])
def test_a_step_of_mlx_allocates_less_than_a_cache(decoder):
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
def test_rows_at_other_positions_equal_separate_rows(backend):
    """Write and read the positions of each row only: nan beyond them has no influence."""
    compiled, params, step = rows_decoder(backend)
    separate = ml.compile(compiled.model, "numpy", inference=True, shapes={"query": [1, 1, 64], "position": []})
    weights = {name: np.array(compiled.backend.to_numpy(x)) for name, x in params.items()}
    past = np.random.default_rng(2).normal(size=(2, 3, 2, 512, 32)).astype(np.float32)
    expected, written = [], []
    for row, start in enumerate(STARTS):
        runner = separate.runner(weights)
        runner._state = dict(zip(separate.initial_state(), np.copy(past[:, row : row + 1]), strict=True))
        steps = [{"query": step(k)["query"][row : row + 1], "position": np.int32(start + k)} for k in range(2)]
        expected.append(run(separate, runner, *steps))
        written.append(list(runner.state.values()))
    past[:, :2, :, 128:] = np.nan
    runner = compiled.runner(params)
    runner._state = dict(zip(compiled.initial_state(), map(compiled.backend.array, past), strict=True))
    results = run(compiled, runner, step(0), step(1))
    np.testing.assert_allclose(np.stack(results, 1), np.concatenate(expected, 1).swapaxes(0, 1), rtol=1e-5, atol=1e-5)
    states = np.stack(list(arrays(compiled, runner.state).values()))
    for row in range(3):
        part, read = np.stack([x[0] for x in written[row]]), 128 if row < 2 else 512
        np.testing.assert_allclose(states[:, row, :, :read], part[:, :, :read], rtol=1e-5, atol=1e-5)


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


@pytest.mark.parametrize("backend", ["numpy", "c"])
def test_a_call_with_other_rows_keeps_the_state(backend):
    """Reject a state of another batch: a program of the C backend would write beyond its end."""
    shapes = {"query": [None, 1, 16], "position": []}
    for options in ({"shapes": shapes}, {}):
        compiled = ml.compile(MultiHeadAttention(16, 2, cache=8), backend, inference=True, **options)
        first, second = ({"query": TOKENS[:, k : k + 1], "position": np.int32(k)} for k in (0, 1))
        params = compiled.randomize_params(0, inputs=first)
        runner = compiled.runner(params)
        run(compiled, runner, first)
        state = runner.state
        expected = compiled.evaluate(params, second, state=state)[0]["output"]
        for count in (1, 5):
            other = {**second, "query": np.repeat(TOKENS[:1, :1], count, 0)}
            with pytest.raises(ml.InputError, match=f"has shape .2, 2, 8, 8., expected .{count}, 2, 8, 8."):
                runner(other)
            with pytest.raises(ml.InputError, match="has shape"):
                compiled.evaluate(params, other, state=state)
            assert compiled.backend.to_numpy(compiled.evaluate(params, other)["output"]).shape == (count, 1, 16)
        np.testing.assert_array_equal(run(compiled, runner, second)[0], compiled.backend.to_numpy(expected))


@pytest.mark.parametrize("batch", [2, 3])
def test_forks_take_rows_along_the_axis_of_the_batch(batch):
    """Take rows of counters of rank 1 and of layers [layers, batch, features], and keep statistics."""

    class Counter(ml.models.Layer):
        inputs = ("input",)

        def build(self, x):
            rows = x.shape[0]
            count, layers = self.state("count", (rows,), "zeros"), self.state("layers", (2, rows, 3), "zeros")
            total = self.state("total", (3,), "zeros")
            self.update_state("count", count + ops.sum(x, axis=1))
            self.update_state("layers", layers + x)
            self.update_state("total", total + ops.sum(x, axis=0))
            return ops.reshape(count, shape=(rows, 1)) + layers[1] + total

    compiled = ml.compile(Counter(), "numpy", inference=True)
    x = np.arange(3 * batch, dtype=np.float32).reshape(batch, 3)
    runner = compiled.runner()
    run(compiled, runner, {"input": x})
    rows = [batch - 1, 0, 0, 1]
    fork = runner.fork(rows).fork([2, 0])
    (expected,) = run(compiled, runner, {"input": x})
    (result,) = run(compiled, fork, {"input": x[:2]})
    np.testing.assert_array_equal(result, expected[[0, batch - 1]])


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


def test_a_state_that_an_update_of_another_becomes_has_no_decision():
    """Report only copies of a state that its own update could overwrite, with the reader that prevents it."""

    class Caches(ml.models.Layer):
        inputs = ("input", "start")

        def build(self, x, start):
            first, second, third = (self.state(name, (2, 8), "zeros") for name in ("first", "second", "third"))
            self.update_state("second", ops.dynamic_update_rows(first, x, start, axis=1))
            self.update_state("third", ops.dynamic_update_rows(third, third, start, axis=1))
            return ops.sum(second, axis=(1,))

    shapes = {"input": [2, 1], "start": [2]}
    compiled = ml.compile(Caches(), "numpy", inference=True, shapes=shapes, types={"start": "int32"})
    run(compiled, compiled.runner(), {"input": np.ones((2, 1), np.float32), "start": np.zeros(2, np.int32)})
    assert [d.message for d in compiled.decisions.of("choice") if "state" in d.message] == [
        "state 'third' is copied in every call: 'dynamic_update_rows' reads its old value"
    ]


def test_a_state_whose_old_value_is_read_is_copied_with_a_decision():
    """Copy a state in every call rather than overwrite a value before its reader."""

    class Cache(ml.models.Layer):
        inputs = ("input", "start")

        def build(self, x, start):
            old = self.state("cache", (2, 8), "zeros")
            self.update_state("cache", ops.dynamic_update_rows(old, x, start, axis=1))
            return ops.sum(old, axis=(1,))

    steps = [{"input": np.full((2, 1), k, np.float32), "start": np.array([k, 3], np.int32)} for k in (1, 2, 3)]
    for backend in ("numpy", "c", "torch"):
        shapes = {"input": [2, 1], "start": [2]}
        compiled = ml.compile(Cache(), backend, inference=True, shapes=shapes, types={"start": "int32"})
        runner = compiled.runner()
        np.testing.assert_array_equal(run(compiled, runner, *steps), [[0, 0], [1, 1], [3, 2]])
        assert [d.message for d in compiled.decisions.of("choice") if "state" in d.message] == [
            "state 'cache' is copied in every call: 'sum' reads its old value"
        ]
