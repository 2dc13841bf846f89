"""``mithril_tools/cost_model.py`` and the fit of its coefficients, on times that are made up."""

from __future__ import annotations

import numpy as np
import pytest

import mithril as ml
from mithril.graph import Builder, op, verify
from mithril.graph.errors import InputError
from mithril.graph.registry import _operations
from mithril.graph.type_rules import numeric
from mithril.ops import add, exp, matmul, reshape, scan
from mithril.system.timing import Lap, Stopwatch, lower_quartile
from mithril_tools.calibrate import Measured, fit_coefficients, nonnegative
from mithril_tools.calibration_models import corpus
from mithril_tools.cost_model import CostModel, Sample, class_of, costly_nodes, kind_of, logarithms, trip_count
from mithril_tools.op_timing import copied


def graph_of(rows, size=64):
    with Builder() as b:
        x = b.input("x", (rows, size))
        y = exp(matmul(x, b.param("w", (size, size)))) + 1.0
        return b.build({"y": y})


def truth(node, overhead=2e-6, rate=1e-10):
    """Return the time on an ideal machine: an overhead, then a constant rate of bytes and operations."""
    flops, bytes_moved = (2**k - 1 for k in logarithms(node)[:2])
    return overhead + rate * flops + 2e-10 * bytes_moved


def samples_of(*graphs):
    return [Sample(n.op.name, kind_of(n), logarithms(n), truth(n)) for g in graphs for n in costly_nodes(g.nodes)]


def test_measured_operations_are_estimated_exactly():
    graph = graph_of(64)
    model = CostModel(samples_of(graph, graph_of(8), graph_of(512)))
    for node in costly_nodes(graph.nodes):
        assert model.op_seconds(node) == pytest.approx(truth(node), rel=0.05)


@pytest.mark.parametrize("rows", [20, 100, 300, 3000])
def test_sizes_between_and_beyond_samples_are_estimated(rows):
    model = CostModel(samples_of(graph_of(1), graph_of(8), graph_of(64), graph_of(512)))
    estimate = sum(model.op_seconds(n) for n in costly_nodes(graph_of(rows).nodes))
    assert estimate == pytest.approx(sum(truth(n) for n in costly_nodes(graph_of(rows).nodes)), rel=0.3)


def test_operations_without_samples_are_named():
    model = CostModel([s for s in samples_of(graph_of(64), graph_of(1024)) if s.op != "exp"])
    estimate = model.estimate(graph_of(256))
    assert estimate.unknown == ("exp",) and estimate.seconds > 0
    assert "no samples, estimated by bytes moved: exp" in str(estimate)


def test_loops_count_their_turns():
    with Builder() as b:
        x = b.input("x", (10, 4))
        last, _ = scan(lambda c, e: (exp(c + e), None), b.input("s", (4,)), x)
        graph = b.build({"y": last})
    (node,) = [n for n in graph.nodes if n.regions]
    assert trip_count(node) == 10 and class_of(node) == "loop"
    assert 2 ** logarithms(node)[0] > 10 * 4


def test_sizes_must_be_known():
    with Builder() as b:
        x = b.input("x", (b_dim := __import__("mithril").Dim("B"), 4))
        graph = b.build({"y": add(x, x)})
    assert b_dim is not None
    with pytest.raises(InputError, match="size of input 'x' is unknown"):
        CostModel(samples_of(graph_of(4))).estimate(graph)


def test_coefficients_are_found_again():
    """Fit calls that take half the time of their products, and nothing for other operations."""

    graphs = [graph_of(r, s) for r in (1, 8, 64, 512) for s in (32, 128, 256)]
    op_seconds = [{n: truth(n, overhead=0.0) for n in costly_nodes(g.nodes)} for g in graphs]
    call_seconds = [1e-5 + 0.5 * sum(t for n, t in seconds.items() if n.op.name == "matmul") for seconds in op_seconds]
    samples = [Sample(n.op.name, kind_of(n), logarithms(n), t) for seconds in op_seconds for n, t in seconds.items()]
    model = fit_coefficients(Measured(graphs, call_seconds, samples))
    assert model.relative_error < 0.1
    estimate = model.estimate(graph_of(200, 200)).seconds
    product = next(n for n in graph_of(200, 200).nodes if n.op.name == "matmul")
    assert estimate == pytest.approx(1e-5 + 0.5 * truth(product, overhead=0.0), rel=0.2)


def test_the_nonnegative_solution_is_the_best_one():
    rng = np.random.default_rng(0)
    a, x = rng.random((20, 4)), np.array([0.0, 2.0, 0.5, 0.0])
    np.testing.assert_allclose(nonnegative(a, a @ x), x, atol=1e-6)
    b = rng.standard_normal(20)
    solution = nonnegative(a, b)
    gradient = a.T @ (a @ solution - b)
    assert (solution >= 0).all() and (gradient > -1e-6).all() and abs(gradient @ solution) < 1e-6


def test_reshapes_move_nothing_and_products_are_products():
    with Builder() as b:
        x = b.input("x", (4, 4))
        graph = b.build({"y": matmul(reshape(x, shape=(2, 8)), reshape(x, shape=(8, 2)))})
    assert [class_of(n) for n in graph.nodes] == ["move", "move", "product"]


def test_copies_do_not_read_each_other():
    graph = graph_of(8)
    scalars = {n.result: n for n in graph.nodes if n.op.name == "constant"}
    node = next(n for n in graph.nodes if n.op.name == "add")
    repeated = copied(node, scalars, 3)
    verify(repeated)
    assert [n.op.name for n in repeated.nodes] == ["constant", "add", "add", "add"]
    assert len(repeated.inputs) == len(repeated.outputs) == 3
    assert {logarithms(n) for n in costly_nodes(repeated.nodes)} == {logarithms(node)}


def test_run_queue_wait_is_not_counted():
    assert Lap(1.0, 0.25, 0.1).cpu_seconds == 0.75
    assert Lap(1.0, 0.9, 0.5).cpu_seconds == 0.5  # the waiting was counted too long: so much was worked
    assert Lap(1.0, 0.0, 3.0).cpu_seconds == 1.0  # on four threads
    assert lower_quartile([Lap(1.0 + k, 0.0, 0.0) for k in range(5)]) == 2.0
    watch = Stopwatch()
    assert watch.lap().seconds < 1.0 and watch.lap(0.5).seconds == 0.5


def test_the_corpus_has_models_of_every_kind():
    models = corpus()
    assert len(models) > 30
    assert {name.split()[0] for name in models} == {
        "perceptron", "transformer", "convolutions", "stem", "upsampling", "recurrent",
    }  # fmt: skip


@pytest.fixture
def bump():
    """Declare a primitive of unknown flops, and restore the registry, as it has no plugin."""
    before = dict(_operations)

    @op(name="acme.bump", shape=lambda x: x, dtype=numeric, samples=[])
    def bump(x):
        """A bump at zero."""
        return np.exp(-x * x)

    yield bump
    _operations.clear()
    _operations.update(before)


def test_unknown_flops_are_named(bump):
    remedy = "unknown flops: acme.bump (declare flops= with the operation)"
    with Builder() as b:
        y = bump(matmul(b.input("x", (2, 3)), b.param("w", (3, 3))))
        scanned, _ = scan(lambda c, e: (bump(c + e), None), y, b.input("more", (4, 2, 3)))
        graph = b.build({"y": scanned})
    estimate = CostModel(samples_of(graph_of(64))).estimate(graph)
    assert estimate.unknown_flops == ("acme.bump",)
    assert remedy in str(estimate)
    compiled = ml.compile(graph, "numpy", optimization_level="none")
    assert f"at least 36 flops\n{remedy}" in compiled.summary()
    inputs = {"x": np.ones((2, 3), np.float32), "more": np.ones((4, 2, 3), np.float32)}
    with ml.profile() as stats:
        compiled.evaluate({"w": np.ones((3, 3), np.float32)}, inputs)
    (row,) = (t for t in stats.execution_breakdown.values() if t.operation == "acme.bump")
    assert (row.flops, row.unknown) == (0, ("acme.bump",))
    assert "unknown" in str(stats.execution_breakdown)
