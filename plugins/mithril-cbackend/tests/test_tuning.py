"""Schedules found by measuring: each of the grid is right, what won is used, kept and not measured again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mithril as ml
from mithril.graph import Builder, Graph
from mithril.models import Linear, Model
from mithril.ops import conv, matmul as product
from mithril_cbackend import building, tir, tuning
from mithril_cbackend.lowering import convolutions, matmul
from mithril_cbackend.lowering.frame import Machine
from mithril_cbackend.purpose import Purpose

RNG = np.random.default_rng(0)


def random(*shape: int) -> np.ndarray[Any, Any]:
    return RNG.standard_normal(shape).astype(np.float32)


def run(graph: Graph, machine: Machine, *arrays: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.array(building.compiled(graph, machine, Purpose())({}, {f"x{k}": a for k, a in enumerate(arrays)})["y"])


def two(function: Any, *arrays: np.ndarray[Any, Any]) -> Graph:
    with Builder() as b:
        made = function(*(b.input(f"x{k}", a.shape) for k, a in enumerate(arrays)))
    return b.build({"y": made})


def test_every_schedule_of_a_product_is_right() -> None:
    x, w = random(37, 50), random(50, 70)
    graph = two(product, x, w)
    machine = Machine(tir.host_cpu(), 1)
    (node,) = graph.nodes
    found = matmul.schedules(node, machine)
    assert "8x32" in found
    name = str(matmul.product_of(node))
    for chosen in found:
        made = run(graph, Machine(machine.cpu, 1, schedules={name: chosen}), x, w)
        np.testing.assert_allclose(made, x @ w, rtol=1e-4, atol=1e-4, err_msg=chosen)


def test_every_schedule_of_a_convolution_is_right() -> None:
    x, w = random(2, 16, 6, 6), random(24, 16, 3, 3)
    how = {"stride": (1, 1), "padding": ((1, 1), (1, 1)), "dilation": (1, 1), "groups": 1}
    graph = two(lambda x, w: conv(x, w, **how), x, w)
    machine = Machine(tir.host_cpu(), 1)
    (node,) = graph.nodes
    found = convolutions.schedules(node, machine)
    assert len(found) > 3 and convolutions.DIRECT in found
    texts = set()
    for chosen in found:
        schedules = {convolutions.signature(node): chosen}
        executable = building.compiled(graph, Machine(machine.cpu, 1, schedules=schedules), Purpose())
        made = executable({}, {"x0": x, "x1": w})["y"]
        np.testing.assert_allclose(made, np.asarray(conv(x, w, **how)), rtol=1e-4, atol=1e-4, err_msg=chosen)
        texts.add(executable.source)
    assert len(texts) == len(found)


def test_level_high_measures_once_and_keeps_what_won(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    model += Linear(256, name="l")
    x = random(64, 128)
    asked = []

    def other(graph: Graph, node: Any, name: str, machine: Machine) -> str:
        asked.append(name)
        return "4x32"

    monkeypatch.setattr(tuning, "fastest", other)

    def compiled() -> Any:
        options = {"optimization_level": "high", "inference": True, "cache_dir": str(tmp_path), "cache": False}
        made = ml.compile(model, "c", shapes={"input": [64, 128]}, **options)
        params = made.randomize_params(0)
        (y,) = made.evaluate(params, {"input": x}).values()
        np.testing.assert_allclose(y, x @ params["l.weight"].T + params["l.bias"], rtol=1e-4, atol=1e-4)
        return made

    first = compiled()
    assert asked == ["64x256x128"]
    assert any("1 operations were measured, 1 are not the usual ones" in str(d) for d in first.decisions)
    assert first.programs[0].executable.machine.schedules == {"64x256x128": "4x32"}
    compiled()
    assert len(asked) == 1


def test_the_fastest_is_measured() -> None:
    x, w = random(128, 256), random(256, 256)
    graph = two(product, x, w)
    (node,) = graph.nodes
    name = str(matmul.product_of(node))
    found = tuning.fastest(graph, node, name, Machine(tir.host_cpu(), 1))
    assert found == tuning.DEFAULT or found in matmul.schedules(node, Machine(tir.host_cpu(), 1))
