"""Convolutions with several plans: which one a size gets, and that values on both sides of a limit agree."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import mithril as ml
from mithril import ops
from mithril.graph import Builder
from mithril_cbackend import tir as t
from mithril_cbackend.compile_target import CompileTarget
from mithril_cbackend.lowering.conv import direct_convolution, im2col, plans_by_size, winograd
from mithril_cbackend.lowering.conv.padding import Layout
from mithril_cbackend.lowering.conv.plans_by_size import BySize, Split
from mithril_cbackend.lowering.element.kernel_builder import KernelBuilder, Machine
from mithril_cbackend.program import compile_graph
from mithril_cbackend.tir import machine_code

RNG = np.random.default_rng(0)
SIZES = [(1, 16), (2, 32), (8, 128), (1, 64), (8, 512)]  # images and all pixels, of 16 or 64 pixels each
MEASURES = [(pixels, images, pixels // images) for images, pixels in SIZES]
TREE = Split(0, 100, Split(1, 1, 0, 1), Split(2, 20, 1, 2))  # by all pixels, images and pixels of an image


def machine(**options: Any) -> Machine:
    return Machine(machine_code.host_cpu(), threads=1, **options)


def chosen(plan: Any, measures: tuple[int, ...]) -> Any:
    """Return the plan that a decision selects for measures of sizes."""
    if not isinstance(plan, BySize):
        return plan
    tree: Any = plan.split
    while isinstance(tree, Split):
        tree = tree.few if measures[tree.measure] <= tree.limit else tree.many
    return plan.plans[tree]


def test_each_size_gets_its_best_plan_of_few() -> None:
    """Decide by two measures, without the plan that is best nowhere, and once for a plan that several sizes need."""
    slow, fast = 3_000_000, 1_000_000
    rows = {(1, 16): "pixels", (1, 64): "pixels", (8, 512): "pixels"}
    costs = [[fast if rows.get(s, "several") == p else slow for p in ("pixels", "none", "several")] for s in SIZES]
    plan = plans_by_size.selected(["pixels", "none", "several"], MEASURES, costs)
    assert [chosen(plan, m) for m in MEASURES] == [rows.get(s, "several") for s in SIZES]
    assert plan.plans == ("pixels", "several")


def test_small_gains_are_not_worth_a_plan() -> None:
    similar = [[1e6, 1.02e6], [1.02e6, 1e6]] * 2 + [[1e6, 1e6]]
    little = [[10.0, 200.0], [200.0, 10.0]] * 2 + [[10.0, 9.0]]  # a call takes longer than its work
    for costs in (similar, little):
        assert isinstance(plans_by_size.selected(["a", "b"], MEASURES, costs), str)


def test_every_example_of_an_open_batch_is_near_its_best_plan() -> None:
    """Compare plans of deep small images: at batch 1 another one than for several images."""
    with Builder() as b:
        x, w = b.input("x", (ml.Dim("n"), 512, 2, 2), "float32"), b.input("w", (512, 512, 3, 3))
        y = ops.conv(x, w, stride=(1, 1), padding=((1, 1),) * 2, dilation=(1, 1), groups=1)
    (node,) = b.build({"y": y}).nodes
    every = [*im2col.plans(node), *winograd.plans(node, machine())]
    sizes = direct_convolution.examples(node)
    costs = [[e.cost(p, machine(), False) * e.pixels * 512 for p in every] for e in sizes]
    plan = plans_by_size.selected(every, [e.measures for e in sizes], costs)
    for example, row in zip(sizes, costs, strict=True):
        assert row[every.index(chosen(plan, example.measures))] < 1.1 * min(row)


@dataclass(frozen=True)
class Number:
    """A plan whose results are its number."""

    batch: Any
    layout: Layout
    number: int

    def scratch(self, machine: Machine, constant_weights: bool) -> list[Any]:
        return []

    def write(self, frame: KernelBuilder, first: int) -> None:
        result = frame.kernel.anchor.result
        with frame.reader.loop("i", math.prod(result.shape)) as i:
            frame.write_flat(result, i, t.const(self.number, "float32"))


SETTINGS = {"stride": (1, 1), "padding": ((1, 1),) * 2, "dilation": (1, 1), "groups": 1}


def compiled(monkeypatch: pytest.MonkeyPatch, plans: Callable[[Any, Machine], Any]) -> Any:
    """Compile a convolution of open sizes with the plans of ``TREE``."""

    def by_size(kernel: Any, machine: Machine, constant_weights: bool) -> BySize:
        return BySize(tuple(plans(kernel.anchor, machine)), TREE)

    monkeypatch.setattr(direct_convolution, "cheaper_plan", by_size)
    with Builder() as b:
        x = b.input("x", (ml.Dim("n"), 9, ml.Dim("h", 2), ml.Dim("w", 2)), "float32")
        y = ops.conv(x, b.input("w", (20, 9, 3, 3)), **SETTINGS)
    return compile_graph.compiled(b.build({"y": y}), machine(vector_bytes=16), CompileTarget())


def test_sizes_on_both_sides_of_each_limit_run_their_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    def numbers(node: Any, machine: Machine) -> list[Any]:
        plan = im2col.plans(node)[0]
        return [Number(plan.batch, plan.layout, k) for k in range(3)]

    executable, w = compiled(monkeypatch, numbers), np.zeros((20, 9, 3, 3), np.float32)
    for shape, number in {(1, 10, 10): 0, (2, 5, 10): 1, (1, 33, 4): 2, (7, 4, 5): 1, (7, 3, 7): 2}.items():
        results = executable({}, {"x": np.zeros((shape[0], 9, *shape[1:]), np.float32), "w": w})["y"]
        assert np.all(results == number), shape


def test_values_agree_on_both_sides_of_each_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run all plans of one kernel, each in its own buffers."""

    def three(node: Any, machine: Machine) -> list[Any]:
        every = [*im2col.plans(node), *winograd.plans(node, machine)]
        names = ("pixels, 16 pixels", "channels, 16 pixels", "winograd, 16 tiles")
        return [next(p for p in every if str(p) == name) for name in names]

    executable, w = compiled(monkeypatch, three), RNG.standard_normal((20, 9, 3, 3)).astype(np.float32)
    for shape in [(1, 10, 10), (2, 5, 10), (1, 33, 2), (1, 101, 2), (6, 4, 5), (5, 3, 7), (5, 7, 3), (1, 17, 19)]:
        image = RNG.standard_normal((shape[0], 9, *shape[1:])).astype(np.float32)
        expected = np.asarray(ops.conv(image, w, **SETTINGS))
        np.testing.assert_allclose(executable({}, {"x": image, "w": w})["y"], expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(("kernel", "stride", "dilation"), [(1, 2, 1), (1, 3, 2), (2, 3, 2), (3, 2, 2), (3, 4, 2)])
def test_only_pixels_that_kernels_read_are_copied(kernel: int, stride: int, dilation: int) -> None:
    """Multiply strided pixels where taps read some of the phases of the image only."""
    settings = {"stride": (stride,) * 2, "padding": ((1, 2),) * 2, "dilation": (dilation,) * 2, "groups": 1}
    image = RNG.standard_normal((2, 12, 19, 23)).astype(np.float32)
    w = RNG.standard_normal((20, 12, kernel, kernel)).astype(np.float32)
    expected = np.asarray(ops.conv(image, w, **settings))
    for sizes in (image.shape, (ml.Dim("n"), 12, ml.Dim("h", 8), ml.Dim("w", 8))):
        with Builder() as b:
            y = ops.conv(b.input("x", sizes, "float32"), b.input("w", w.shape), **settings)
        executable = compile_graph.compiled(b.build({"y": y}), machine(vector_bytes=16), CompileTarget())
        np.testing.assert_allclose(executable({}, {"x": image, "w": w})["y"], expected, rtol=1e-4, atol=2e-5)
