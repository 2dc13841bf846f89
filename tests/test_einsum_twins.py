"""A model written with einsum gets whatever its twin written with matmul gets."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import mithril as ml
from mithril import ops
from mithril.graph import Builder
from mithril.graph.decomposition import decompose
from mithril.graph.evaluation import evaluate
from mithril.graph.traits import is_product
from mithril.models import Layer
from mithril_cbackend.graph.int8_weights import quantized
from mithril_parallel.mesh import Mesh
from mithril_parallel.placing.propagate import propagate
from mithril_parallel.placing.strategy import choose
from mithril_passes.operation_forms.kernel_selection import _size
from mithril_tools.cost_model import class_of, size_of

FORMS = {
    "matmul": lambda x, w: ops.matmul(x, w),
    "einsum": lambda x, w: ops.einsum(x, w, equation="...k,kn->...n"),
    "dot": lambda x, w: ops.dot(x, w, contract_a=(len(x.shape) - 1,), contract_b=(0,)),
    "weight first": lambda x, w: ops.einsum(w, x, equation="kn,...k->...n"),
    "rows": lambda x, w: ops.einsum(x, ops.transpose(w), equation="...k,nk->...n"),
}
TWINS = [name for name in FORMS if name != "matmul"]


class Perceptron(Layer):
    """Two products with a bias and a nonlinearity between them."""

    def __init__(self, form):
        self.form = form

    def build(self, x):
        product = FORMS[self.form]
        h = product(x, self.param("up", (x.shape[-1], 64), init="normal(std=0.1)"))
        h = ops.relu(h + self.param("bias", (64,), init="normal(std=0.1)"))
        return product(h, self.param("down", (64, 32), init="normal(std=0.1)"))


def model(form):
    return Perceptron(form)


def graph(form):
    with Builder("pair") as b:
        product = FORMS[form]
        x = b.input("x", (16, 32))
        h = ops.relu(product(x, b.param("up", (32, 64))) + b.param("bias", (64,)))
        y = product(h, b.param("down", (64, 32)))
    return b.build({"y": y})


@pytest.mark.parametrize("form", TWINS)
def test_mixed_precision(form):
    """Run all products in 16 bits."""
    compiled = ml.compile(model(form), "numpy", shapes={"input": (4, 32)}, mixed_precision=True)
    products = [n for n in compiled.graph.nodes if n.op.name in ("matmul", "dot", "linear", "einsum")]
    assert [n.result.dtype.name for n in products] == ["bfloat16", "bfloat16"]


@pytest.mark.parametrize("form", TWINS)
@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
def test_ggml_packs_the_same_weights(form, kind):
    x = np.random.default_rng(0).standard_normal((3, 32)).astype(np.float32)
    results = {}
    for name in ("matmul", form):
        compiled = ml.compile(model(name), ml.GGMLBackend(quantize=kind), shapes={"input": (3, 32)})
        params = compiled.randomize_params(0)
        (output,) = compiled.evaluate(params, {"input": x}).values()
        executable = compiled.programs[0].executable
        results[name] = {(e.input.name, e.kind.name, e.rows) for e in executable.packing.all_entries}, output
    assert len(results["matmul"][0]) == 2
    assert results[form][0] == results["matmul"][0]
    np.testing.assert_allclose(results[form][1], results["matmul"][1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", TWINS)
def test_tensor_parallelism_splits_the_same_weights(form):
    mesh = Mesh({"data": 2, "model": 4})
    assert choose(graph("matmul"), mesh).splits["up"] == (None, "model")
    assert choose(graph(form), mesh).splits == choose(graph("matmul"), mesh).splits


@pytest.mark.parametrize("form", TWINS)
def test_the_c_backend_keeps_the_same_weights_in_eight_bits(form):
    """Scales are multiplied with the product, so that no weight is widened."""
    rng = np.random.default_rng(0)
    params = {n: rng.standard_normal(s).astype(np.float32) for n, s in {"up": (32, 64), "down": (64, 32)}.items()}
    params["bias"] = np.zeros(64, np.float32)
    x = {"x": rng.standard_normal((16, 32)).astype(np.float32)}
    outputs, arrays = {}, {}
    for name in ("matmul", form):
        lowered = decompose(graph(name), lambda node: not node.op.composite)
        narrow, arrays[name] = quantized(lowered, params)
        assert not any(n.op.name == "dequantize" for n in narrow.nodes)
        outputs[name] = evaluate(narrow, {**arrays[name], **x})["y"]
    assert {n: a.dtype for n, a in arrays[form].items()} == {n: a.dtype for n, a in arrays["matmul"].items()}
    assert arrays[form]["up"].dtype == np.int8
    np.testing.assert_allclose(outputs[form], outputs["matmul"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", TWINS)
def test_plans_and_cost_models(form):
    """Count the same operations, bytes and exchanges."""
    mesh = Mesh({"data": 2, "model": 4})
    counts = {}
    for name in ("matmul", form):
        lowered = decompose(graph(name), lambda node: not node.op.composite)
        products = [n for n in lowered.nodes if class_of(n) == "product"]
        splits = choose(lowered, mesh).splits
        results = propagate(lowered, mesh, splits)
        counts[name] = (
            [size_of(n)[0] for n in products],
            Counter((e.kind, e.axis, e.bytes) for e in results.exchanges),
            [is_product(n) for n in products],
        )
    assert counts[form] == counts["matmul"]
    assert len(counts[form][0]) == 2


@pytest.mark.parametrize("form", TWINS)
def test_memory_plans_and_sizes_of_work(form):
    """Plan the same memory with gradients, and measure the same products when choosing kernels."""
    plans = {}
    for name in ("matmul", form):
        compiled = ml.compile(model(name), "numpy", shapes={"input": (16, 32)})
        peak = compiled.memory_report(gradients=True).peak
        # in units that a bias, which joins some of the forms, does not fill
        plans[name] = peak, [_size(n) // 1024 for n in compiled.graph.nodes if is_product(n)]
    assert plans[form] == plans["matmul"]
    assert plans[form][1] == [16 * 32 * 64 // 1024] * 5


@pytest.mark.parametrize("form", TWINS)
def test_the_c_backend_plans_the_same_arena(form):
    arenas = {}
    for name in ("matmul", form):
        compiled = ml.compile(model(name), "c", shapes={"input": (16, 32)}, inference=True)
        compiled.randomize_params(0)
        arenas[name] = compiled.programs[0].executable.arena.nbytes
    assert arenas[form] <= arenas["matmul"]
