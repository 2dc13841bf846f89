"""Attention as one kernel: matched in graphs of primitives, equal to separate kernels for all sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mithril as ml
from mithril import ops
from mithril.graph import Builder, Graph
from mithril.graph.decomposition import decompose
from mithril.graph.evaluation import evaluate
from mithril.models import IOKey, Model, MultiHeadAttention
from mithril_cbackend.backend import CBackend
from mithril_cbackend.compile_target import CompileTarget
from mithril_cbackend.graph import fusion
from mithril_cbackend.lowering.element import kernel_builder
from mithril_cbackend.lowering.element.kernel import Kernel
from mithril_cbackend.lowering.element.kernel_builder import Machine
from mithril_cbackend.program import compile_graph
from mithril_cbackend.tir import machine_code

RNG = np.random.default_rng(0)
Arrays = dict[str, np.ndarray[Any, Any]]


def random(*shape: int) -> np.ndarray[Any, Any]:
    return RNG.standard_normal(shape).astype(np.float32)


def heads(batch: int, count: int, queries: int, keys: int, size: int, values: int | None = None) -> Arrays:
    """Return queries, keys and values of `count` heads."""
    return {
        "q": random(batch, count, queries, size),
        "k": random(batch, count, keys, size),
        "v": random(batch, count, keys, size if values is None else values),
    }


def graph_of(function: Any, arrays: Arrays) -> Graph:
    with Builder() as b:
        result = function(*(b.input(n, a.shape, a.dtype.name) for n, a in arrays.items()))
    return decompose(b.build({"y": result}), CBackend().lowers)


def kinds(graph: Graph, **machine: Any) -> list[str]:
    """Return the templates of a graph's kernels."""
    steps = fusion.group(graph, Machine(machine_code.host_cpu(), **{"threads": 1, **machine})).steps
    return [s.kind for s in steps if isinstance(s, Kernel)]


def run(graph: Graph, arrays: Arrays, **machine: Any) -> np.ndarray[Any, Any]:
    executable = compile_graph.compiled(
        graph, Machine(machine_code.host_cpu(), **{"threads": 1, **machine}), CompileTarget()
    )
    return np.array(executable({}, arrays)["y"])


def check(function: Any, arrays: Arrays, *, only_kernel: bool = True, **machine: Any) -> None:
    """Compare with NumPy, and require one kernel of attention; with ``only_kernel``, no other kernel."""
    graph = graph_of(function, arrays)
    templates = kinds(graph, **machine)
    assert templates.count("attention") == 1, templates
    assert not only_kernel or templates == ["attention"], templates
    expected = np.asarray(function(*arrays.values()))
    largest = float(np.nanmax(np.abs(expected), initial=1e-30))
    np.testing.assert_allclose(run(graph, arrays, **machine), expected, rtol=2e-5, atol=2e-5 * largest)


@pytest.fixture(autouse=True)
def _threads_share_small_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_builder, "PARALLEL_WORK", 1)


def causal(q: Any, k: Any, v: Any) -> Any:
    return ops.attention(q, k, v, causal=True)


SIZES = [
    (1, 2, 128, 128, 64),
    (2, 3, 70, 45, 24),
    (1, 2, 5, 100, 16),
    (1, 3, 1, 75, 32),
    (1, 1, 80, 32, 128),
    (1, 2, 3, 2, 5),
    (2, 1, 1, 1, 1),
]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_sizes(sizes: tuple[int, ...], threads: int) -> None:
    check(ops.attention if threads == 1 else causal, heads(*sizes), threads=threads)


@pytest.mark.parametrize("vector_bytes", [64, 32, 16, 4])
def test_widths_of_vectors(vector_bytes: int) -> None:
    check(causal, heads(1, 2, 50, 70, 20, 30), vector_bytes=vector_bytes)
    check(ops.attention, heads(1, 2, 1, 70, 64), vector_bytes=vector_bytes)


@pytest.mark.parametrize("threads", [1, 2])
def test_heads_that_share_keys(threads: int) -> None:
    arrays = {"q": random(2, 6, 20, 16), "k": random(2, 2, 30, 16), "v": random(2, 2, 30, 16)}
    check(ops.attention, arrays, threads=threads)
    check(causal, arrays, threads=threads)
    masked = arrays | {"mask": random(1, 6, 20, 30)}
    check(ops.attention, masked, threads=threads)


def test_matrices_without_heads() -> None:
    function = lambda q, k, v: ops.matmul(ops.softmax(ops.matmul(q, k) * 0.3, axis=-1), v)  # noqa: E731
    check(function, {"q": random(40, 24), "k": random(24, 70), "v": random(70, 12)})
    check(function, {"q": random(3, 40, 24), "k": random(24, 70), "v": random(3, 70, 12)})
    check(function, {"q": random(3, 40, 24), "k": random(3, 24, 70), "v": random(70, 12)})


# -- masks --------------------------------------------------------------------------------------------------------
def test_masks() -> None:
    q, k, v = heads(2, 3, 37, 50, 16).values()
    full_mask = RNG.random((2, 3, 37, 50)) < 0.7
    for mask in (
        full_mask,
        full_mask[:, :1],
        full_mask[:1, :, :1],
        random(1, 3, 37, 50),
        random(37, 50),
        random(1, 1, 1, 50),
    ):
        check(ops.attention, {"q": q, "k": k, "v": v, "mask": mask})
    check(lambda *given: ops.attention(*given, causal=True), {"q": q, "k": k, "v": v, "mask": full_mask})


def test_queries_that_see_no_key_give_nan() -> None:
    arrays = heads(1, 2, 70, 40, 16)
    check(causal, arrays)  # the first thirty precede all keys
    mask = np.ones((1, 1, 70, 40), bool)
    mask[..., 5, :] = mask[..., 69, :] = False
    check(ops.attention, arrays | {"mask": mask})
    graph = graph_of(ops.attention, arrays | {"mask": mask})
    assert np.isnan(run(graph, arrays | {"mask": mask})[0, :, [5, 69]]).all()


def test_nan_stays_in_its_row() -> None:
    arrays = heads(1, 1, 40, 40, 16)
    arrays["q"][0, 0, 7, 3] = np.nan
    check(ops.attention, arrays)


@pytest.mark.parametrize("queries", [2, 9, 40])
def test_rows_without_a_key_become_zero_where_nan_is_replaced(queries: int) -> None:
    """Exporters of other frameworks guard weights in this way."""
    arrays = heads(1, 2, queries, 32, 16)
    arrays["mask"] = RNG.random((queries, 32)) > 0.3
    arrays["mask"][0] = False
    arrays["q"][0, 1, 1, 3] = np.nan

    def guarded(q: Any, k: Any, v: Any, mask: Any) -> Any:
        zero = ops.full(shape=(), value=0.0)  # before the scaled queries, as where equal constants are one
        q = q * 1.5
        scores = ops.where(mask, (q @ ops.transpose(k, perm=(0, 1, 3, 2))) * 0.25, -np.inf)
        weights = ops.softmax(scores, axis=-1)
        return ops.where(ops.isnan(weights), zero, weights) @ v

    check(guarded, arrays)
    assert (run(graph_of(guarded, arrays), arrays)[0, 1, :2] == 0).all()


def test_how_many_keys_are_seen_may_be_known_late() -> None:
    """A cache: which keys there are is a number that the call is given."""

    def cached(q: Any, k: Any, v: Any, position: Any) -> Any:
        rows = ops.iota(shape=(q.shape[2], 1), axis=0, dtype="int32") + ops.reshape(position, shape=())
        seen = ops.less_equal(ops.iota(shape=(1, k.shape[2]), axis=1, dtype="int32"), rows)
        return ops.attention(q, k, v, seen)

    for queries in (1, 40):
        arrays = heads(1, 2, queries, 100, 32)
        graph = graph_of(cached, arrays | {"position": np.zeros(1, np.int32)})
        assert kinds(graph) == ["attention"]
        program = compile_graph.compiled(graph, Machine(machine_code.host_cpu(), 1), CompileTarget())
        for position in (0, 31, 32, 60, 99, 2**31 - 100):
            inputs = arrays | {"position": np.full(1, position, np.int32)}
            expected = np.asarray(cached(*inputs.values()))
            np.testing.assert_allclose(program({}, inputs)["y"], expected, rtol=2e-5, atol=2e-5, err_msg=str(position))


def test_a_window_of_keys() -> None:
    """Conditions that say more than how many keys are seen."""

    def window(q: Any, k: Any, v: Any) -> Any:
        rows, columns = (ops.iota(shape=(60, 60), axis=axis, dtype="int32") for axis in (0, 1))
        in_window = ops.less(rows + -16, columns)
        return ops.attention(q, k, v, ops.logical_and(in_window, ops.greater_equal(rows, columns)))

    check(window, heads(1, 2, 60, 60, 16))


# -- what is around -----------------------------------------------------------------------------------------------
def layer(causal: bool = True, **options: Any) -> Model:
    x = IOKey("input")
    return Model.create(inputs=x, outputs=MultiHeadAttention(48, 3, causal=causal, name="attention", **options)(x))


@pytest.mark.parametrize("options", [{}, {"rotary": True}, {"kv_heads": 1}, {"bias": False}], ids=str)
def test_heads_are_accessed_without_transposes(options: dict[str, Any]) -> None:
    compiled = ml.compile(layer(**options), "c", shapes={"input": [2, 30, 48]}, inference=True)
    params = compiled.randomize_params(0)
    x = {"input": random(2, 30, 48)}
    outputs = compiled.evaluate(params, x)
    expected = evaluate(compiled.programs[0].traced, {**params, **x})
    np.testing.assert_allclose(outputs["output"], expected["output"], rtol=1e-4, atol=1e-5)
    templates = kinds(compiled.programs[0].executable.graph)
    assert templates.count("attention") == 1
    if "rotary" not in options:  # which has kernels of its own
        assert sorted(templates) == ["attention", *["matmul"] * 4]


def test_scores_are_not_in_the_arena() -> None:
    inputs = heads(1, 8, 512, 512, 16)
    executable = compile_graph.compiled(graph_of(causal, inputs), Machine(machine_code.host_cpu(), 1), CompileTarget())
    assert executable.program.arena < 1 << 20  # scores are 8 MiB


def test_weights_that_are_read_elsewhere_are_stored() -> None:
    def both(q: Any, k: Any, v: Any) -> Any:
        weights = ops.softmax(ops.matmul(q, ops.transpose(k, perm=(0, 1, 3, 2))), axis=-1)
        return ops.concat(ops.matmul(weights, v), weights, axis=-1)

    arrays = heads(1, 2, 20, 30, 16)
    graph = graph_of(both, arrays)
    assert "attention" not in kinds(graph)
    np.testing.assert_allclose(run(graph, arrays), both(*arrays.values()), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_gradients_are_those_of_the_references(causal: bool) -> None:
    """Weights that the backward graph needs as well are stored, and all is as it was without this kernel."""
    x, slope = {"input": random(2, 20, 48)}, random(2, 20, 48)
    compiled = ml.compile(layer(causal), "c", shapes={"input": [2, 20, 48]})
    params = compiled.randomize_params(0)
    outputs, gradients = compiled.evaluate(params, x, output_gradients=slope)
    expected = evaluate(compiled.programs[-1].graph, {**params, **x, "grad/output": slope})
    np.testing.assert_allclose(outputs["output"], expected["output"], rtol=1e-4, atol=1e-5)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(gradient, expected[f"grad/{name}"], rtol=1e-3, atol=1e-4, err_msg=name)
