"""Levels of memory of a hardware target select fusion and kernels."""

from __future__ import annotations

import numpy as np
import pytest

import mithril as ml
from mithril import ops
from mithril.plugins import HardwareTarget, MemoryLevel, hookimpl, register, unregister


class Boards:
    """CPUs that differ in their scratchpad only, and in the cost of an exponential only."""

    @hookimpl
    def mithril_targets(self):
        sizes = {"tiny": 256, "large": 1 << 20}
        costs = {"quick_exp": 1.0, "slow_exp": 40.0}
        return [
            *(
                HardwareTarget(name, family="cpu", levels=(MemoryLevel("sram", size, scratchpad=True),))
                for name, size in sizes.items()
            ),
            *(HardwareTarget(name, family="cpu", instructions={"exp": cost}) for name, cost in costs.items()),
        ]


@pytest.fixture
def boards():
    register(Boards(), name="boards")
    yield
    unregister("boards")


def kernels(compiled):
    """Return the number of kernels of the program."""
    return len(compiled.programs[0].executable.program.kernels)


def softmax(x):
    return ops.softmax(x, axis=-1)


def attention(x):
    return ops.matmul(ops.softmax(ops.matmul(x, ops.transpose(x, perm=(0, 2, 1))), axis=-1), x)


@pytest.mark.parametrize("function", [softmax, attention])
def test_a_tiny_scratchpad_gets_another_fusion_than_a_large_one(boards, function):
    with ml.Builder() as b:
        x = b.input("x", (2, 64, 256), "float32")
        graph = b.build({"y": function(x)})
    inputs = {"x": np.random.default_rng(0).normal(size=(2, 64, 256)).astype(np.float32)}
    compiled = {name: ml.compile(graph, "c", target_hardware=name) for name in ("tiny", "large")}
    results = [model.evaluate({}, inputs)["y"] for model in compiled.values()]
    np.testing.assert_allclose(*results, rtol=1e-4, atol=1e-5)
    assert kernels(compiled["tiny"]) > kernels(compiled["large"])


@pytest.mark.parametrize("function", [softmax, attention])
def test_decisions_say_how_a_scratchpad_is_used(boards, function):
    with ml.Builder() as b:
        graph = b.build({"y": function(b.input("x", (2, 64, 256), "float32"))})
    compiled = {name: ml.compile(graph, "c", target_hardware=name) for name in ("tiny", "large")}
    for name, model in compiled.items():
        assert f"fusion: {kernels(model)} kernels, whose rows take" in str(model.explain())
        assert f"the levels of memory of '{name}' select kernels and fusion" in str(model.explain())


def test_costs_of_instructions_select_fusion(boards):
    """Compute an element that a reader broadcasts again if that is cheap on the target, and store it otherwise."""
    with ml.Builder() as b:
        x = b.input("x", (1, 64), "float32")
        graph = b.build({"y": ops.exp(x) + b.input("z", (64, 64), "float32")})
    inputs = {"x": np.ones((1, 64), np.float32), "z": np.ones((64, 64), np.float32)}
    compiled = {name: ml.compile(graph, "c", target_hardware=name) for name in ("quick_exp", "slow_exp")}
    np.testing.assert_allclose(*[model.evaluate({}, inputs)["y"] for model in compiled.values()])
    assert [kernels(model) for model in compiled.values()] == [1, 2]
    assert "the costs of instructions of 'slow_exp' select fusion" in str(compiled["slow_exp"].explain())
