"""Convolutions of images of symbolic sizes: every way to cut them into blocks at run time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mithril as ml
from mithril import ops
from mithril.graph import Builder, Graph, Input
from mithril_cbackend.compile_target import CompileTarget
from mithril_cbackend.lowering.conv import direct_convolution
from mithril_cbackend.lowering.element import kernel_builder
from mithril_cbackend.lowering.element.kernel_builder import Machine
from mithril_cbackend.program import compile_graph
from mithril_cbackend.tir import machine_code

RNG = np.random.default_rng(0)
CASES = {  # channels, weights, stride, padding, groups
    "dense": (5, (20, 5, 3, 3), 1, 1, 1),
    "strided": (6, (36, 6, 3, 3), 2, 1, 1),
    "one pixel": (16, (33, 16, 1, 1), 1, 0, 1),
    "groups": (8, (16, 4, 3, 2), 1, 0, 2),
}
SIZES = [(1, 9, 7), (3, 4, 5), (1, 33, 20), (2, 3, 70), (5, 3, 3), (0, 8, 8)]  # batch, height, width
WAYS = {  # of all cases, by the options of the machine and whether weights are constant
    "vectors of 64 bytes": (
        {"vector_bytes": 64},
        False,
        {"dense": "winograd, 16 tiles", "strided": "channels, 16 pixels", "one pixel": "pixels, 16 pixels"}
        | {"groups": "pixels, 128 pixels"},
    ),
    "two threads": (
        {"vector_bytes": 16, "threads": 2},
        True,
        {"dense": "winograd, 64 tiles", "strided": "pixels, 32 pixels", "one pixel": "channels, 16 pixels"}
        | {"groups": "channels, 64 pixels"},
    ),
}
Array = np.ndarray[Any, Any]


def weights() -> dict[str, Array]:
    return {name: RNG.standard_normal(shape).astype(np.float32) for name, (_, shape, *_) in CASES.items()}


def blocks(w: dict[str, Array], is_constant: bool) -> Graph:
    """Return convolutions of one image per case, with a bias and a rectifier."""
    size = [ml.Dim("n"), ml.Dim("h", 3), ml.Dim("w", 3)]
    with Builder() as b:
        results = {}
        for name, (channels, shape, stride, padding, groups) in CASES.items():
            image, kernels = b.input(f"x {name}", (size[0], channels, *size[1:]), "float32"), b.input(name, shape)
            pads = ((padding, padding),) * 2
            y = ops.conv(image, kernels, stride=(stride,) * 2, padding=pads, dilation=(1, 1), groups=groups)
            results[name] = ops.maximum(y * 0.5 + 0.25, 0.0)
    graph = b.build(results)
    inputs = [Input(i.value, "constant", w[i.name]) if is_constant and i.name in w else i for i in graph.inputs]
    return graph.replaced(inputs=tuple(inputs))


def expected(name: str, x: Array, w: Array) -> Array:
    _, _, stride, padding, groups = CASES[name]
    pads = ((padding, padding),) * 2
    y = np.asarray(ops.conv(x, w, stride=(stride,) * 2, padding=pads, dilation=(1, 1), groups=groups))
    return np.maximum(y * np.float32(0.5) + np.float32(0.25), 0)


@pytest.mark.parametrize("case", WAYS)
def test_every_way_to_cut_images(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the loops of each way on sizes that tiles do not divide."""
    monkeypatch.setattr(kernel_builder, "PARALLEL_WORK", 1)
    (options, is_constant, ways), w = WAYS[case], weights()
    graph = blocks(w, is_constant)
    convolutions = [node for node in graph.nodes if node.op is ops.conv]
    schedules = {direct_convolution.signature(n): ways[k] for n, k in zip(convolutions, CASES, strict=True)}
    machine = Machine(machine_code.host_cpu(), **{"threads": 1, **options}, schedules=schedules)
    executable = compile_graph.compiled(graph, machine, CompileTarget())
    kernels = [k for k in executable.program.kernels.values() if k.anchor.op is ops.conv]
    plans = [direct_convolution.cheaper_plan(k, machine, is_constant) for k in kernels]
    assert {str(p) for p in plans} == {*ways.values()}
    for batch, *image in SIZES:
        x = {f"x {name}": RNG.standard_normal((batch, CASES[name][0], *image)).astype(np.float32) for name in CASES}
        results = executable({}, x if is_constant else x | w)
        for name in CASES:
            y = expected(name, x[f"x {name}"], w[name])
            np.testing.assert_allclose(results[name], y, rtol=1e-4, atol=2e-5, err_msg=f"{name}, {batch} {image}")
