"""A cache or a table of positions that is full raises on every backend; its last places are never written twice."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mithril as ml
from mithril.graph.errors import InputError
from mithril.models import Model, MultiHeadAttention, PositionalEmbedding, Relu, While

BACKENDS = [n for n in ("numpy", "torch", "jax", "mlx", "c", "ggml") if n in ml.plugins.backends()]


def compiled(layer: Any, backend: str, **shapes: Any) -> Any:
    model = Model()
    model |= layer(**{name: name for name in shapes}, output="output")
    program = ml.compile(model, backend, shapes=shapes, inference=True)
    return program.bind(program.randomize_params(seed=0))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_full_cache_of_keys_raises(backend: str, tmp_path: Any) -> None:
    model = compiled(MultiHeadAttention(heads=2, cache=8), backend, query=[1, 4, 16], position=[])
    x = np.ones((1, 4, 16), np.float32)
    for position in (0, 4):
        assert set(model({"query": x, "position": np.int32(position)})) == {"output"}
    for position in (5, 8, -1):
        with pytest.raises(InputError, match="'MultiHeadAttention' holds 8 positions"):
            model({"query": x, "position": np.int32(position)})


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_cache_that_is_full_in_one_row_raises(backend: str) -> None:
    model = compiled(MultiHeadAttention(heads=2, cache=8), backend, query=[2, 2, 16], position=[2])
    x = np.ones((2, 2, 16), np.float32)
    model({"query": x, "position": np.array([6, 0], np.int32)})
    with pytest.raises(InputError, match="'MultiHeadAttention' holds 8 positions"):
        model({"query": x, "position": np.array([0, 7], np.int32)})


@pytest.mark.parametrize("backend", BACKENDS)
def test_positions_behind_the_table_raise(backend: str) -> None:
    model = compiled(PositionalEmbedding(4), backend, input=[1, 3, 16], position=[])
    x = np.ones((1, 3, 16), np.float32)
    model({"input": x, "position": np.int32(1)})
    with pytest.raises(InputError, match="'PositionalEmbedding' holds 4 positions"):
        model({"input": x, "position": np.int32(2)})
    free = compiled(PositionalEmbedding(4), backend, input=[1, "T", 16])
    assert free({"input": np.ones((1, 4, 16), np.float32)})["output"].shape == (1, 4, 16)
    with pytest.raises(ml.MithrilError, match="T <= 4|7 positions, the layer has 4"):
        free({"input": np.ones((1, 7, 16), np.float32)})


@pytest.mark.parametrize("backend", ["numpy", "torch", "jax", "mlx"])
def test_attention_to_a_cache_of_no_rows_or_queries_is_empty(backend: str) -> None:
    modules = {name: f"mithril_{name}.helpers" for name in ("torch", "jax", "mlx")}
    helpers = pytest.importorskip(modules.get(backend, "mithril.backend"))
    array = ml.compile(Relu(), backend).backend.array
    for batch, queries in ((0, 1), (2, 0), (0, 0)):
        for seen in {batch, 1}:  # masks of each row, and of all
            q, k = np.zeros((batch, 4, queries, 8), np.float32), np.zeros((batch, 2, 200, 8), np.float32)
            arrays = [array(x) for x in (q, k, k, np.ones((seen, 1, queries, 200), bool))]
            options = {"scale": 0.5, "enable_gqa": True} if backend == "torch" else {"scale": 0.5}
            assert tuple(helpers.cached_attention(*arrays, **options).shape) == q.shape


def test_a_full_cache_raises_inside_of_a_loop() -> None:
    body = Model()
    body |= MultiHeadAttention(heads=2, cache=4)(query="h", position="i", output="next")
    model = Model()
    model |= While(
        condition="i < n",
        body=body,
        initial_state={"h": "x", "i": 0},
        loop_vars={"h": "next", "i": "i + 1"},
        output_vars={"y": "h"},
    )(output="y")
    model |= Relu()(input="y", output="output")
    program = ml.compile(model, "numpy", shapes={"x": [1, 1, 16], "n": []}, types={"n": "int32"}, inference=True)
    program.bind(program.randomize_params(seed=0))
    x = np.ones((1, 1, 16), np.float32)
    program({"x": x, "n": np.int32(4)})
    with pytest.raises(InputError, match="holds 4 positions"):
        program({"x": x, "n": np.int32(5)})


def test_a_cached_program_still_raises(tmp_path: Any) -> None:
    for _ in range(2):
        model = Model()
        model |= MultiHeadAttention(heads=2, cache=8)(query="query", position="position", output="output")
        program = ml.compile(
            model, "numpy", shapes={"query": [1, 4, 16], "position": []}, cache=True, cache_dir=str(tmp_path)
        )
        program.bind(program.randomize_params(seed=0))
        with pytest.raises(InputError, match="holds 8 positions"):
            program({"query": np.ones((1, 4, 16), np.float32), "position": np.int32(5)})


@pytest.mark.parametrize("backend", BACKENDS)
def test_runner_checks_positions_of_any_length(backend: str) -> None:
    """Check positions of a table, which depend on the symbolic length, before the cache is overwritten."""
    model = Model()
    model |= PositionalEmbedding(8)(input="x", position="position", output="h")
    model |= MultiHeadAttention(heads=2, cache=8)(query="h", position="position", output="y")
    program = ml.compile(model, backend, shapes={"x": [1, None, 16], "position": []}, inference=True)
    runner = program.bind(program.randomize_params(seed=0)).runner()
    for position, length in ((0, 5), (5, 1), (6, 2)):
        runner({"x": np.ones((1, length, 16), np.float32), "position": np.int32(position)})
    with pytest.raises(InputError, match="holds 8 positions"):
        runner({"x": np.ones((1, 2, 16), np.float32), "position": np.int32(7)})


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_batch_without_rows(backend: str) -> None:
    model = compiled(MultiHeadAttention(heads=2, cache=8), backend, query=[0, 1, 16], position=[0])
    result = model({"query": np.zeros((0, 1, 16), np.float32), "position": np.zeros(0, np.int32)})
    assert result["output"].shape == (0, 1, 16)
