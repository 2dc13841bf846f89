"""Runners own the state of successive calls, on every backend."""

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


def test_a_failed_call_keeps_the_state():
    compiled = ml.compile(MultiHeadAttention(heads=2, cache=2), "numpy", inference=True)
    step = {"query": TOKENS[:, :1], "position": np.int32(0)}
    runner = compiled.runner(compiled.randomize_params(inputs=step))
    runner(step)
    before = runner.state
    with pytest.raises(ml.InputError, match="holds 2 positions"):
        runner({**step, "position": np.int32(2)})
    assert runner.state is before


def test_optional_inputs_of_a_single_layer():
    compiled = ml.compile(MultiHeadAttention(heads=2), "numpy", inference=True)
    query = TOKENS[:, :3]
    params = compiled.randomize_params(inputs={"query": query})
    free = compiled.evaluate(params, {"query": query})["output"]
    mask = np.tril(np.ones((3, 3), bool))
    causal = compiled.evaluate(params, {"query": query, "mask": mask})["output"]
    assert not np.allclose(free[:, 0], causal[:, 0]) and np.allclose(free[:, 2], causal[:, 2], atol=1e-6)
    assert compiled.model.heads == 2
