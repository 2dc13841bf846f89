"""3x3 convolutions by sixteen products for 2x2 results: every way to cut them, exactness, infinities."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mithril as ml
from mithril.graph import Builder, Graph, Input
from mithril.models import Conv2d, IOKey, Model
from mithril.ops import conv, conv_input_grad, maximum
from mithril_cbackend.compile_target import CompileTarget
from mithril_cbackend.lowering.conv import direct_convolution, winograd
from mithril_cbackend.lowering.element import kernel_builder
from mithril_cbackend.lowering.element.kernel_builder import Machine
from mithril_cbackend.program import compile_graph, program
from mithril_cbackend.program.c_module import module_text
from mithril_cbackend.tir import machine_code

RNG = np.random.default_rng(0)
DENSE = {"stride": (1, 1), "padding": ((1, 1), (1, 1)), "dilation": (1, 1), "groups": 1}
Arrays = dict[str, np.ndarray[Any, Any]]


def random(*shape: int) -> np.ndarray[Any, Any]:
    return RNG.standard_normal(shape).astype(np.float32)


def graph_of(function: Any, arrays: Arrays, constants: tuple[str, ...] = ()) -> Graph:
    with Builder() as b:
        result = function(*(b.input(n, a.shape) for n, a in arrays.items()))
    graph = b.build({"y": result})
    inputs = [Input(i.value, "constant", arrays[i.name], i.tags) if i.name in constants else i for i in graph.inputs]
    return graph.replaced(inputs=tuple(inputs))


def run(graph: Graph, arrays: Arrays, machine: Machine) -> np.ndarray[Any, Any]:
    inputs = {i.name: arrays[i.name] for i in graph.arguments}
    return np.array(compile_graph.compiled(graph, machine, CompileTarget())({}, inputs)["y"])


def ways(
    function: Any, arrays: Arrays, constants: tuple[str, ...] = (), **machine: Any
) -> dict[str, np.ndarray[Any, Any]]:
    """Return the result of every Winograd plan."""
    graph = graph_of(function, arrays, constants)
    usual = Machine(machine_code.host_cpu(), **{"threads": 1, **machine})
    node = next(n for n in graph.nodes if n.op.name.startswith("conv"))
    names = [str(p) for p in winograd.plans(node, usual)]
    assert names
    plans = {
        n: Machine(usual.cpu, usual.threads, usual.vector_bytes, {direct_convolution.signature(node): n}) for n in names
    }
    return {n: run(graph, arrays, m) for n, m in plans.items()}


@pytest.fixture(autouse=True)
def _threads_share_small_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_builder, "PARALLEL_WORK", 1)


SIZES = {
    "even": (1, 8, 20, 12, 12),
    "odd": (1, 5, 33, 9, 7),
    "wider than vectors": (1, 3, 16, 6, 70),
    "several images": (4, 6, 32, 4, 5),
    "two pixels": (1, 16, 64, 2, 2),
}


@pytest.mark.parametrize("constants", [(), ("w",)])
@pytest.mark.parametrize("name", list(SIZES))
def test_every_way_to_cut_it(name: str, constants: tuple[str, ...]) -> None:
    batch, channels, filters, height, width = SIZES[name]
    arrays = {"x": random(batch, channels, height, width), "w": random(filters, channels, 3, 3)}
    arrays |= {"b": random(filters, 1, 1), "r": random(batch, filters, height, width)}

    def block(x: Any, w: Any, b: Any, r: Any) -> Any:
        return maximum(conv(x, w, **DENSE) + b + r, 0.0)

    expected = np.asarray(block(*arrays.values()))
    options = {"threads": 2, "vector_bytes": 32} if constants else {}
    for plan, actual in ways(block, arrays, constants, **options).items():
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5, err_msg=plan)


@pytest.mark.parametrize("padding", [((0, 0), (0, 0)), ((2, 1), (0, 3))])
def test_borders(padding: Any) -> None:
    arrays = {"x": random(2, 4, 9, 11), "w": random(16, 4, 3, 3)}
    how = {**DENSE, "padding": padding}
    expected = np.asarray(conv(*arrays.values(), **how))
    for actual in ways(lambda x, w: conv(x, w, **how), arrays).values():
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


def test_the_gradient_of_the_image() -> None:
    arrays = {"g": random(2, 24, 8, 8), "w": random(24, 20, 3, 3)}

    def back(g: Any, w: Any) -> Any:
        return conv_input_grad(g, w, shape=(2, 20, 8, 8), **DENSE)

    expected = np.asarray(back(*arrays.values()))
    for actual in ways(back, arrays).values():
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=2e-5)


def test_it_is_chosen_where_there_are_channels_enough() -> None:
    machine = Machine(machine_code.host_cpu(), 1)

    def chosen(channels: int, size: int) -> Any:
        arrays = {"x": random(1, channels, size, size), "w": random(channels, channels, 3, 3)}
        graph = graph_of(lambda x, w: conv(x, w, **DENSE), arrays)
        (kernel,) = program.write(graph, machine).kernels.values()
        return direct_convolution.cheaper_plan(kernel, machine, constant_weights=True)

    assert isinstance(chosen(64, 28), winograd.Plan)
    assert not isinstance(chosen(4, 28), winograd.Plan)


def test_no_less_exact_than_sums_of_products() -> None:
    arrays = {"x": random(1, 128, 14, 14), "w": random(32, 128, 3, 3)}
    exact = np.asarray(conv(*(a.astype(np.float64) for a in arrays.values()), **DENSE))
    plain = graph_of(lambda x, w: conv(x, w, **DENSE), arrays)
    node = plain.nodes[0]
    schedule = {direct_convolution.signature(node): direct_convolution.DIRECT}
    direct = np.abs(run(plain, arrays, Machine(machine_code.host_cpu(), 1, 64, schedule)) - exact).max()
    for actual in ways(lambda x, w: conv(x, w, **DENSE), arrays).values():
        assert np.abs(actual - exact).max() <= direct


def test_infinities_stay_where_they_are_met() -> None:
    arrays = {"x": random(1, 4, 12, 12), "w": random(16, 4, 3, 3)}
    arrays["x"][0, 1, 5, 6], arrays["x"][0, 2, 11, 0], arrays["x"][0, 3, 0, 10] = np.inf, np.nan, -np.inf
    with np.errstate(invalid="ignore"):
        expected = np.asarray(conv(*arrays.values(), **DENSE))
    for actual in ways(lambda x, w: conv(x, w, **DENSE), arrays).values():
        assert (np.isfinite(actual) == np.isfinite(expected)).all()
        finite = np.isfinite(expected)
        np.testing.assert_allclose(actual[finite], expected[finite], rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not (shutil.which("gcc") and shutil.which("make")), reason="no C compiler")
def test_in_c(tmp_path: Path) -> None:
    x = IOKey("input")
    model = Model.create(inputs=x, outputs=Conv2d(64, 72, kernel_size=3, padding=1, name="c")(x))
    compiled = ml.compile(model, "c", shapes={"input": [1, 64, 13, 14]}, static_inference=True)
    compiled.bind(compiled.randomize_params(0))
    compiled({"input": random(1, 64, 13, 14)})
    assert "transformed" in compiled.source
    compiled.export(tmp_path)
    subprocess.run(["make", "model_test"], cwd=tmp_path, check=True, capture_output=True)
    subprocess.run(["./model_test"], cwd=tmp_path, check=True, capture_output=True)


def test_convolutions_of_equal_sizes_share_all_but_their_last_operations():
    x, w, z = random(1, 32, 14, 14), random(32, 32, 3, 3), random(1, 32, 14, 14)

    def three(x: Any, w: Any, z: Any) -> Any:
        y = maximum(conv(x, w, **DENSE), 0.0)
        y = maximum(conv(y, w, **DENSE) + z, 0.0)
        return conv(y, w, **DENSE)

    graph = graph_of(three, {"x": x, "w": w, "z": z})
    written = program.write(graph, Machine(machine_code.host_cpu(), 2))
    assert [k.anchor.op.name for k in written.kernels.values()] == ["conv"] * 3
    parts = [n.rpartition("_")[0].rpartition("_")[0] for n in written.functions if n not in written.kernels]
    assert sorted(p for p in parts if p.startswith("winograd")) == [
        "winograd_image", "winograd_kernels", "winograd_pixels", "winograd_products",
    ]  # fmt: skip
    source = module_text(written, 16)
    assert source.count("winograd_products_") == 1 + 3  # defined once, and called by each kernel
