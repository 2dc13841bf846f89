"""An operation of a third party, with one string for its axes, gets whatever passes and backends derive from it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest

import mithril as ml
from mithril import ops
from mithril.graph import Builder, declare, flops, traits
from mithril.graph.dims import Dim
from mithril.graph.evaluation import evaluate
from mithril.graph.registry import operations
from mithril.graph.samples import sample
from mithril.graph.type_rules import numeric
from mithril.ops.row_independence import first_row_mixing_node
from mithril_cbackend.graph.int8_weights import quantized
from mithril_parallel.mesh import Mesh
from mithril_parallel.placing.strategy import choose
from mithril_parallel.sharding.spmd import partition_graph
from mithril_testing import OpConformance

sys.path.insert(0, str(Path(__file__).parents[1] / "plugins" / "mithril-parallel" / "tests"))
from shards import run

RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def acme():
    """Two products, declared as a plugin declares them."""

    @declare.op(
        name="acme.scores",
        shape=lambda q, k: (q[0], q[1], k[1]),
        dtype=numeric,
        promotes="same",
        samples=[sample((2, 3, 4), (2, 5, 4))],
        axes="b m k, b n k -> b m n | k sum",
        linear="q | k",
    )
    def scores(q, k):
        """The product of each query with each key of its example."""
        return np.einsum("bmk,bnk->bmn", q, k)

    @declare.op(
        name="acme.project",
        shape=lambda x, w: (*x[:-1], w[0]),
        dtype=numeric,
        promotes="same",
        samples=[sample((3, 4), (5, 4)), sample((2, 3, 4), (6, 4), label="batch")],
        axes="*x k, n k -> *x n | k sum",
        linear="x | w",
    )
    def project(x, w):
        """The product of each row with each row of the weight."""
        return np.matmul(x, w.T)

    scores.no_vjp("it is for inference")
    project.no_vjp("it is for inference")
    yield scores, project
    for name in ("acme.scores", "acme.project"):
        operations_table().pop(name, None)


def operations_table():
    from mithril.graph import registry

    return registry._operations


def chain(project, batch=8):
    with Builder("chain") as b:
        x = b.input("x", (batch, 32))
        h = ops.relu(project(x, b.param("up", (64, 32))) + b.param("bias", (64,)))
        y = project(h, b.param("down", (32, 64)))
    return b.build({"y": y})


def arguments(graph):
    return {i.name: RNG.standard_normal(i.type.shape).astype(np.float32) for i in graph.inputs}


def test_the_kit_checks_it(acme):
    for operation in acme:
        OpConformance().test_axes(operation)


def test_batches_can_be_bucketed(acme):
    B = Dim("B", 1, 64)
    assert first_row_mixing_node(chain(acme[1], B), B) is None
    with Builder() as b:
        y = acme[0](b.input("q", (B, 3, 4)), b.input("k", (B, 5, 4)))
    assert first_row_mixing_node(b.build({"y": y}), B) is None


@pytest.mark.parametrize(
    "ways",
    [
        {"x0": ("data", None, None), "x1": ("data", None, None)},
        {"x0": (None, "data", None), "x1": (None, "model", None)},
        {"x0": (None, None, "model"), "x1": (None, None, "model")},
        {"x0": ("data", None, "model"), "x1": (None, None, None)},
    ],
)
def test_it_runs_on_parts(acme, ways):
    with Builder() as b:
        y = acme[0](b.input("x0", (4, 6, 8)), b.input("x1", (4, 2, 8)))
    graph = b.build({"y": y})
    values = arguments(graph)
    sharded = partition_graph(graph, {"data": 2, "model": 2}, ways)
    assert any(n.op.name == "mesh.all_reduce" for n in sharded.graph.nodes) == ("model" in ways["x0"])
    np.testing.assert_allclose(run(sharded, values)["y"], evaluate(graph, values)["y"], rtol=1e-5, atol=1e-5)


def test_weights_are_split_in_pairs(acme):
    """Columns first, then rows: one sum over devices for two products."""
    splits = choose(chain(acme[1]), Mesh({"data": 1, "model": 4})).splits
    assert splits == {"up": ("model", None), "bias": ("model",), "down": (None, "model")}


def test_operations_are_counted(acme):
    node = chain(acme[1]).nodes[0]
    assert flops(node) == 2 * 8 * 32 * 64
    assert traits.is_product(node)


def test_it_runs_small_under_mixed_precision(acme):
    from mithril.passes import PassContext, PassManager
    from mithril_passes.precision.mixed_precision import mixed_precision

    context = PassContext(options={"mixed_precision": True})
    (narrow, *_) = PassManager([mixed_precision]).run(chain(acme[1]), context)
    products = [n for n in narrow.nodes if n.op.name == "acme.project"]
    assert [n.result.dtype.name for n in products] == ["bfloat16", "bfloat16"]


def test_its_weights_are_quantized(acme):
    """GGML packs them, and widens them for the declaration; int8 weights of the C backend stay narrow."""
    from mithril.backend.base import BuildOptions

    graph = chain(acme[1])
    values = arguments(graph)
    expected = evaluate(graph, values)["y"]
    executable = ml.GGMLBackend(quantize="q8_0").build(graph, BuildOptions())
    assert {e.input.name for e in executable.packing.entries} == {"up", "down"}
    params = {n: a for n, a in values.items() if n != "x"}
    output = executable(params, {"x": values["x"]})["y"]
    assert 0 < np.linalg.norm(output - expected) / np.linalg.norm(expected) < 0.02
    narrow, arrays = quantized(graph, params)
    assert not any(n.op.name == "dequantize" for n in narrow.nodes)
    output = evaluate(narrow, {**arrays, "x": values["x"]})["y"]
    assert 0 < np.linalg.norm(output - expected) / np.linalg.norm(expected) < 0.02


def test_an_operation_without_axes_is_reported():
    """It runs on full operands, and the decisions say so, once."""

    @declare.op(name="acme.silent", shape=lambda x: x, dtype=numeric, samples=[sample((2, 3))])
    def silent(x):
        """Return x twice as large."""
        return x * 2

    silent.no_vjp("it is for inference")

    class Silent(ml.models.Layer):
        def build(self, x):
            return silent(silent(x))

    try:
        compiled = ml.compile(Silent(), "numpy", shapes={"input": (2, 3)})
        messages = [d.message for d in compiled.decisions.of("choice") if "acme.silent" in d.message]
        assert messages == ["operation 'acme.silent' declares no axes: it runs on full operands"]
    finally:
        operations_table().pop("acme.silent")


def test_a_false_string_is_found(acme):
    from mithril_testing.axes import false_axes, with_axes

    lying = with_axes(acme[0], "b m k, b n k -> b m n | k max")
    assert false_axes(lying) == ["acme.scores[0]: factor 'k' (max): parts give something else"]
    assert operations()["acme.scores"].declared_axes.endswith("k sum")


def test_the_page_about_operations_runs():
    """Run the code of docs/operations.md, block after block; then the checks that it announces."""
    page = (Path(__file__).parents[1] / "docs" / "operations.md").read_text().replace("acme.project", "acme.page")
    names: dict = {"__name__": "acme_page"}
    try:
        for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
            exec(compile(block, "docs/operations.md", "exec"), names)
        OpConformance().test_axes(names["project"])
    finally:
        operations_table().pop("acme.page", None)
