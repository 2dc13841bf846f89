"""Levels of memory of a hardware target select fusion and kernels."""

from __future__ import annotations

import numpy as np
import pytest

import mithril as ml
from mithril import ops
from mithril.plugins import HardwareTarget, MemoryLevel, hookimpl, register, unregister


class Boards:
    """Two CPUs that differ in their scratchpad only."""

    @hookimpl
    def mithril_targets(self):
        sizes = {"tiny": 256, "large": 1 << 20}
        return [
            HardwareTarget(name, family="cpu", levels=(MemoryLevel("sram", size, scratchpad=True),))
            for name, size in sizes.items()
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
