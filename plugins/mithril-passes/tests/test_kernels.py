"""Variants of operations: equal results, preferences of backends, stored measurements."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import mithril as ml
from mithril import ops
from mithril.backend.base import BuildOptions
from mithril.graph import Builder, Dim
from mithril.graph.evaluation import evaluate
from mithril.models import Conv2d, Linear, Model
from mithril.passes import PassContext, random_arguments
from mithril_numpy.backend import NumpyBackend
from mithril_passes.operation_forms import kernel_selection
from mithril_passes.operation_forms.kernel_selection import kernel_choice
from mithril_passes.operation_forms.op_variants import WAYS, variants_of
from mithril_passes.operation_forms.specialization import specialize_operations
from mithril_testing import PassConformance
from mithril_testing.fake_clock import FakeClock

ONE = {"stride": (1, 1), "padding": ((0, 0), (0, 0)), "dilation": (1, 1), "groups": 1}
UNEVEN = {"stride": (2, 1), "padding": ((1, 2), (0, 1)), "dilation": (1, 2), "groups": 3}
FLAT = {**UNEVEN, "stride": (1, 1)}
CASES = {
    "linear": [
        ("linear", [(1, 5), (4, 5), (4,)], {"activation": "relu"}),
        ("linear", [(1, 1, 5), (4, 5), None], {}),
        ("linear", [(2, 3, 5), (4, 5), (4,)], {"activation": "gelu"}),
    ],
    "products": [("matmul", [(2, 6, 3), (2, 3, 5)], {}), ("matmul", [(6, 1), (1, 5)], {})],
    "composites": [
        ("attention", [(2, 4, 5, 8), (2, 2, 5, 8), (2, 2, 5, 8)], {"causal": True}),
        ("softmax", [(3, 5)], {"axis": -1}),
        ("log_softmax", [(3, 5)], {"axis": -1}),
        ("layer_norm", [(3, 5), (5,), (5,)], {}),
        ("rms_norm", [(3, 5), (5,)], {}),
        ("gelu", [(3, 5)], {"approximate": "tanh"}),
    ],
    "pointwise": [
        ("conv", [(2, 3, 5, 6), (4, 3, 1, 1)], ONE),
        ("conv", [(2, 3, 5, 6), (4, 3, 1, 1)], {**ONE, "stride": (2, 3)}),
        ("conv_input_grad", [(2, 4, 5, 6), (4, 3, 1, 1)], {**ONE, "shape": (2, 3, 5, 6)}),
        ("conv_weight_grad", [(2, 3, 5, 6), (2, 4, 5, 6)], {**ONE, "shape": (4, 3, 1, 1)}),
    ],
    "depthwise": [
        ("conv", [(2, 3, 7, 6), (3, 1, 3, 2)], UNEVEN),
        ("conv", [(2, 3, 7, 6), (3, 1, 3, 2)], FLAT),
        ("conv_input_grad", [(2, 3, 8, 5), (3, 1, 3, 2)], {**FLAT, "shape": (2, 3, 7, 6)}),
        ("conv_weight_grad", [(2, 3, 7, 6), (2, 3, 4, 5)], {**UNEVEN, "shape": (3, 1, 3, 2)}),
    ],
}
ALL = [case for group in CASES.values() for case in group]


def one(name, shapes, attributes):
    with Builder() as b:
        operands = [None if s is None else b.input(f"x{k}", s) for k, s in enumerate(shapes)]
        y = getattr(ops, name)(*operands, **attributes)
    return b.build({"y": y})


class TestSpecialization(PassConformance):
    pass_ = "specialize-operations"
    context = PassContext(backend=NumpyBackend())
    graphs = {"pixels": one("conv", [(2, 3, 5, 6), (4, 3, 1, 1)], ONE)}


@pytest.mark.parametrize(("name", "shapes", "attributes"), ALL, ids=[f"{c[0]}-{k}" for k, c in enumerate(ALL)])
def test_every_way_gives_the_same(name, shapes, attributes):
    graph = one(name, shapes, attributes)
    (node,) = (n for n in graph.nodes if n.op.name == name)
    arguments = random_arguments(graph)
    expected = evaluate(graph, arguments)["y"]
    variants = variants_of(node)
    assert variants
    for way in variants:
        with Builder() as b:
            operands = [None if s is None else b.input(f"x{k}", s) for k, s in enumerate(shapes)]
            y = way.make(node, *operands)
        actual = evaluate(b.build({"y": y}), arguments)["y"]
        assert actual.shape == expected.shape and actual.dtype == expected.dtype
        np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-5, err_msg=way.name)


def test_all_ways_are_tried_above():
    tried = {(c[0], w.name) for c in ALL for w in variants_of(next(n for n in one(*c).nodes if n.op.name == c[0]))}
    assert tried == {(op, w.name) for op, variants in WAYS.items() for w in variants}


@pytest.mark.parametrize(
    ("name", "shapes", "attributes"),
    [
        ("conv", [(2, 3, 5, 6), (4, 3, 1, 1)], {**ONE, "padding": ((1, 0), (0, 0))}),
        ("conv", [(2, 4, 5, 6), (4, 2, 1, 1)], {**ONE, "groups": 2}),
        ("conv_input_grad", [(2, 4, 3, 6), (4, 3, 1, 1)], {**ONE, "stride": (2, 1), "shape": (2, 3, 5, 6)}),
        ("matmul", [(6, 5), (5, 5)], {}),
        ("matmul", [(2,), (2,)], {}),
    ],
)
def test_no_way_where_it_would_be_another_meaning(name, shapes, attributes):
    assert not variants_of(one(name, shapes, attributes).nodes[-1])


def test_sixteen_bits_are_not_summed_term_by_term():
    with Builder() as b:
        y = ops.conv(b.input("x", (2, 3, 7, 6), "bfloat16"), b.input("w", (3, 1, 3, 2), "bfloat16"), **FLAT)
    assert not variants_of(b.build({"y": y}).nodes[-1])


def test_backends_get_their_preferred_variant():
    graph = one("conv", [(ml.Dim("B"), 3, 5, 6), (4, 3, 1, 1)], ONE)
    result = specialize_operations(graph, PassContext(backend=NumpyBackend()))
    assert "conv" not in {n.op.name for n in result.nodes}
    arguments = random_arguments(graph)
    np.testing.assert_allclose(evaluate(result, arguments)["y"], evaluate(graph, arguments)["y"], rtol=1e-5, atol=1e-6)

    class Indifferent(NumpyBackend):
        capabilities = replace(NumpyBackend().capabilities, prefers={})

    assert specialize_operations(graph, PassContext(backend=Indifferent())) is graph


def test_consecutive_operations():
    """The second uses the replacement of the first."""
    with Builder() as b:
        x, w, v = (b.input(n, s) for n, s in (("x", (2, 3, 5, 6)), ("w", (4, 3, 1, 1)), ("v", (2, 4, 1, 1))))
        y = ops.conv(ops.conv(x, w, **ONE), v, **ONE)
    graph = b.build({"y": y})
    result = specialize_operations(graph, PassContext(backend=NumpyBackend()))
    assert "conv" not in {n.op.name for n in result.nodes}
    arguments = random_arguments(graph)
    np.testing.assert_allclose(evaluate(result, arguments)["y"], evaluate(graph, arguments)["y"], rtol=1e-5, atol=1e-6)


class Sluggish(NumpyBackend):
    """A backend whose convolutions take their time."""

    name = "numpy"
    built = 0
    clock: FakeClock

    def build(self, graph, options=None):
        executable = super().build(graph, options or BuildOptions())
        type(self).built += 1
        if not any(n.op.name == "conv" for n in graph.nodes):
            return executable
        return lambda params, inputs: (self.clock.sleep(0.003), executable(params, inputs))[1]


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    monkeypatch.setattr(Sluggish, "clock", FakeClock(monkeypatch), raising=False)


def large_conv():
    return one("conv", [(1, 16, 32, 32), (16, 16, 1, 1)], ONE)


def test_the_fastest_way_is_taken_and_remembered(tmp_path, monkeypatch):
    context = PassContext(backend=Sluggish(), options={"cache_dir": tmp_path})
    result = kernel_choice(large_conv(), context)
    assert "conv" not in {n.op.name for n in result.nodes}
    (decision,) = context.decisions.of("choice")
    assert "'conv'" in decision.message and "pointwise-matmul" in decision.message
    Sluggish.built = 0
    again = kernel_choice(large_conv(), PassContext(backend=Sluggish(), options={"cache_dir": tmp_path}))
    assert str(again) == str(result) and Sluggish.built == 0
    monkeypatch.setattr(kernel_selection, "package_version_key", lambda name: "another version")
    kernel_choice(large_conv(), PassContext(backend=Sluggish(), options={"cache_dir": tmp_path}))
    assert Sluggish.built == 4  # both alone, and in the graph


def test_old_measurements_are_repeated(tmp_path, monkeypatch):
    context = PassContext(backend=Sluggish(), options={"cache_dir": tmp_path})
    kernel_choice(large_conv(), context)
    Sluggish.built = 0
    month = SimpleNamespace(time=lambda: time.time() + 31 * 24 * 3600)
    monkeypatch.setattr("mithril.system.measured.time", month)
    kernel_choice(large_conv(), context)
    assert Sluggish.built == 4


def test_a_variant_that_does_not_make_the_program_faster_is_refused(tmp_path):
    class Coupled(Sluggish):
        """A backend on which the variant is faster alone, but not next to another operation."""

        def build(self, graph, options=None):
            executable = NumpyBackend.build(self, graph, options)
            names = {n.op.name for n in graph.nodes}
            seconds = 0.003 if "conv" in names or "tanh" in names else 0.0
            return lambda params, inputs: (self.clock.sleep(seconds), executable(params, inputs))[1]

    with Builder() as b:
        y = ops.tanh(ops.conv(b.input("x", (1, 16, 32, 32)), b.input("w", (16, 16, 1, 1)), **ONE))
    graph = b.build({"y": y})
    context = PassContext(backend=Coupled(), options={"cache_dir": tmp_path})
    assert kernel_choice(graph, context) is graph
    (decision,) = context.decisions.of("choice")
    assert "is faster alone, but the program is not" in decision.message and "times as fast" not in str(decision)


def test_a_program_of_open_sizes_is_unchanged_as_it_cannot_be_timed(tmp_path):
    with Builder() as b:
        y = ops.conv(b.input("x", (1, 16, 32, 32)), b.input("w", (16, 16, 1, 1)), **ONE)
        z = ops.tanh(b.input("z", (Dim("B", 1, 8), 4)))
    graph = b.build({"y": y, "z": z})
    context = PassContext(backend=Sluggish(), options={"cache_dir": tmp_path})
    assert kernel_choice(graph, context) is graph
    (decision,) = context.decisions.of("choice")
    assert "is faster alone, but the program cannot be timed" in decision.message


def test_fast_operations_are_unchanged(tmp_path):
    class Fast(Sluggish):
        def build(self, graph, options=None):
            executable = NumpyBackend.build(self, graph, options)
            if any(n.op.name == "conv" for n in graph.nodes):
                return executable
            return lambda params, inputs: (self.clock.sleep(0.003), executable(params, inputs))[1]

    graph = large_conv()
    assert kernel_choice(graph, PassContext(backend=Fast(), options={"cache_dir": tmp_path})) is graph


def test_small_and_symbolic_operations_are_not_measured(tmp_path):
    context = PassContext(backend=Sluggish(), options={"cache_dir": tmp_path})
    for shapes in ([(1, 3, 5, 6), (4, 3, 1, 1)], [(ml.Dim("B"), 16, 32, 32), (16, 16, 1, 1)]):
        graph = one("conv", shapes, ONE)
        assert kernel_choice(graph, context) is graph


def test_unwritable_store_is_tolerated(tmp_path):
    (tmp_path / "file").write_text("")
    context = PassContext(backend=Sluggish(), options={"cache_dir": tmp_path / "file" / "below"})
    assert "conv" not in {n.op.name for n in kernel_choice(large_conv(), context).nodes}
    assert any("cannot be stored" in d.message for d in context.decisions.of("choice"))


def test_nothing_is_measured_here_for_hardware_elsewhere(tmp_path):
    graph, target = large_conv(), SimpleNamespace(family="tpu")
    context = PassContext(backend=Sluggish(), target=target, options={"cache_dir": tmp_path})
    assert kernel_choice(graph, context) is graph
    assert specialize_operations(graph, PassContext(backend=NumpyBackend(), target=target)) is graph


def test_high_level_compiles_and_gives_the_same(tmp_path):
    model = Model()
    model += Conv2d(3, 32, kernel_size=1)
    model += Linear(16)
    options = {"shapes": {"input": [1, 3, 32, 32]}, "cache_dir": tmp_path}
    plain = ml.compile(model, "numpy", optimization_level="none", **options)
    high = ml.compile(model, "numpy", optimization_level="high", **options)
    params = plain.randomize_params(seed=0)
    x = {"input": np.random.default_rng(0).normal(size=(1, 3, 32, 32)).astype(np.float32)}
    np.testing.assert_allclose(
        high.evaluate(params, x)["output"], plain.evaluate(params, x)["output"], rtol=1e-4, atol=1e-5
    )
