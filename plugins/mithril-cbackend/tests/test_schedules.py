"""The tiled templates on sizes that the kit's small samples do not reach: ragged, grouped, strided, in batches."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mithril as ml
from mithril.graph import Builder, Graph, Input, bfloat16, int32
from mithril.models import Conv2d, IOKey, Linear, Model, Relu
from mithril.ops import (
    conv,
    conv_input_grad,
    conv_weight_grad,
    dynamic_update_slice,
    exp,
    matmul,
    max,
    maximum,
    mean,
    reshape,
    softmax as softmax_layer,
    sqrt,
    sum,
    tanh,
    transpose,
)
from mithril_cbackend.compile_target import CompileTarget
from mithril_cbackend.lowering.element import kernel_builder
from mithril_cbackend.lowering.element.kernel_builder import Machine
from mithril_cbackend.program import compile_graph, program as programs
from mithril_cbackend.program.executable import Executable
from mithril_cbackend.tir import machine_code

RNG = np.random.default_rng(0)


def relu(x: Any) -> Any:
    return maximum(x, 0.0)


def random(*shape: int) -> np.ndarray[Any, Any]:
    return RNG.standard_normal(shape).astype(np.float32)


def graph_of(function: Any, arrays: dict[str, np.ndarray[Any, Any]], constants: tuple[str, ...] = ()) -> Graph:
    """Build a graph of one function; arrays in ``constants`` are constants of it."""
    with Builder() as b:
        result = function(*(b.input(n, a.shape) for n, a in arrays.items()))
    graph = b.build({"y": result})
    inputs = [Input(i.value, "constant", arrays[i.name], i.tags) if i.name in constants else i for i in graph.inputs]
    return graph.replaced(inputs=tuple(inputs))


def run(graph: Graph, arrays: dict[str, np.ndarray[Any, Any]], machine: Machine) -> np.ndarray[Any, Any]:
    executable: Executable = compile_graph.compiled(graph, machine, CompileTarget())
    inputs = {n: a for n, a in arrays.items() if n in {i.name for i in graph.arguments}}
    return np.array(executable({}, inputs)["y"])


def check(
    function: Any, arrays: dict[str, np.ndarray[Any, Any]], *, constants: tuple[str, ...] = (), **machine: Any
) -> None:
    graph = graph_of(function, arrays, constants)
    actual = run(graph, arrays, Machine(machine_code.host_cpu(), **{"threads": 1, **machine}))
    expected = np.asarray(function(*arrays.values()))
    np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-5 * float(np.abs(expected).max()))


@pytest.fixture(autouse=True)
def _threads_share_small_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_builder, "PARALLEL_WORK", 1)


WIDTHS = pytest.mark.parametrize("vector_bytes", [64, 32, 16, 4])


# -- products -----------------------------------------------------------------------------------------------------
@WIDTHS
@pytest.mark.parametrize("constants", [(), ("w",)])
@pytest.mark.parametrize("m, k, n", [(1, 100, 70), (3, 64, 32), (5, 33, 17), (37, 45, 50), (64, 16, 33), (20, 7, 4)])
def test_products(m: int, k: int, n: int, constants: tuple[str, ...], vector_bytes: int) -> None:
    for function, w in (
        (lambda x, w: relu(matmul(x, w)), random(k, n)),
        (lambda x, w: matmul(x, transpose(w, perm=(1, 0))), random(n, k)),
    ):
        check(function, {"x": random(m, k), "w": w}, constants=constants, vector_bytes=vector_bytes)


@pytest.mark.parametrize("threads", [1, 2])
def test_products_of_many_matrices(threads: int) -> None:
    check(matmul, {"x": random(2, 3, 20, 40), "w": random(2, 3, 40, 50)}, threads=threads)
    check(matmul, {"x": random(2, 3, 20, 40), "w": random(1, 3, 40, 50)}, threads=threads)
    check(matmul, {"x": random(3, 20, 40), "w": random(2, 1, 40, 50)}, threads=threads)
    attention = lambda q, k: matmul(q, transpose(k, perm=(0, 2, 3, 1)))  # noqa: E731
    check(attention, {"q": random(2, 3, 20, 40), "k": random(2, 50, 3, 40)}, threads=threads)


def test_threads_share_the_rows_of_a_single_packed_block() -> None:
    check(matmul, {"x": random(256, 300), "w": random(300, 10)}, threads=2)
    check(matmul, {"x": random(3, 128, 200), "w": random(200, 20)}, threads=2)


def test_a_known_operand_is_packed_once() -> None:
    w = random(64, 96)
    graph = graph_of(matmul, {"x": random(16, 64), "w": w}, ("w",))
    program = programs.write(graph, Machine(machine_code.host_cpu(), 1))
    (packed,) = program.constants.values()
    assert packed.size == w.size
    assert sorted(packed.tolist()) == sorted(w.reshape(-1).tolist())


# -- convolutions -------------------------------------------------------------------------------------------------
IMAGES = {
    "one pixel": ((1, 24), (1, 1), 40, (3, 3), 1, 1, 1),
    "few pixels": ((2, 24), (2, 2), 40, (3, 3), 1, 1, 1),
    "seven": ((1, 16), (7, 7), 37, (3, 3), 1, 1, 1),
    "seven, three images": ((3, 16), (7, 7), 32, (3, 3), 1, 1, 1),
    "fourteen": ((1, 20), (14, 14), 48, (3, 3), 1, 1, 1),
    "large": ((1, 8), (40, 24), 16, (3, 3), 1, 1, 1),
    "strided": ((2, 12), (15, 17), 20, (3, 3), 2, 1, 1),
    "seven by seven, stride 2": ((1, 3), (33, 32), 16, (7, 7), 2, 3, 1),
    "points": ((2, 32), (14, 14), 24, (1, 1), 1, 0, 1),
    "points, few": ((3, 32), (3, 3), 40, (1, 1), 1, 0, 1),
    "points, strided": ((1, 32), (14, 14), 24, (1, 1), 2, 0, 1),
    "groups": ((2, 24), (9, 9), 36, (3, 3), 1, 1, 3),
    "depthwise": ((1, 32), (12, 12), 32, (3, 3), 1, 1, 32),
    "signal": ((2, 16), (50,), 24, (5,), 1, 2, 1),
    "signal, strided": ((1, 16), (50,), 24, (4,), 3, 1, 1),
    "volume": ((1, 6), (5, 6, 7), 10, (3, 3, 3), 1, 1, 1),
}


@pytest.mark.parametrize("constants", [(), ("w",)])
@pytest.mark.parametrize("name", list(IMAGES))
def test_convolutions(name: str, constants: tuple[str, ...]) -> None:
    (batch, channels), size, filters, kernel, stride, padding, groups = IMAGES[name]
    rank = len(size)
    how = {
        "stride": (stride,) * rank,
        "padding": ((padding, padding),) * rank,
        "dilation": (1,) * rank,
        "groups": groups,
    }
    arrays = {"x": random(batch, channels, *size), "w": random(filters, channels // groups, *kernel)}
    arrays["b"] = random(filters, *(1,) * rank)
    check(lambda x, w, b: relu(conv(x, w, **how) + b), arrays, constants=constants)
    if rank == 2:
        check(lambda x, w, b: conv(x, w, **how) + b, arrays, constants=constants, threads=2, vector_bytes=32)


@pytest.mark.parametrize("name", list(IMAGES))
def test_gradients_of_convolutions(name: str) -> None:
    (batch, channels), size, filters, kernel, stride, padding, groups = IMAGES[name]
    rank = len(size)
    how = {
        "stride": (stride,) * rank,
        "padding": ((padding, padding),) * rank,
        "dilation": (1,) * rank,
        "groups": groups,
    }
    x, w = random(batch, channels, *size), random(filters, channels // groups, *kernel)
    g = np.asarray(np.asarray(conv(x, w, **how)), order="C")
    check(lambda g, w: conv_input_grad(g, w, shape=x.shape, **how), {"g": g, "w": w})
    check(lambda x, g: conv_weight_grad(x, g, shape=w.shape, **how), {"x": x, "g": g})


def test_what_follows_a_convolution_may_read_its_image() -> None:
    arrays = {"x": random(1, 24, 7, 7), "w": random(24, 24, 3, 3)}
    how = {"stride": (1, 1), "padding": ((1, 1), (1, 1)), "dilation": (1, 1), "groups": 1}
    check(lambda x, w: relu(conv(x, w, **how) + x), arrays)


# -- rows ---------------------------------------------------------------------------------------------------------
def kernels_of(function: Any, arrays: dict[str, np.ndarray[Any, Any]]) -> list[str]:
    program = programs.write(graph_of(function, arrays), Machine(machine_code.host_cpu(), 1))
    return [k.kind for k in program.kernels.values()]


def softmax(x: Any) -> Any:
    e = exp(x - max(x, axis=-1, keepdims=True))
    return e / sum(e, axis=-1, keepdims=True)


def normalized(x: Any, s: Any, b: Any) -> Any:
    centered = x - mean(x, axis=-1, keepdims=True)
    return centered / sqrt(mean(centered * centered, axis=-1, keepdims=True) + 1e-5) * s + b


@WIDTHS
@pytest.mark.parametrize("shape", [(5, 64), (3, 2, 37), (4, 16), (2, 100), (70,)])
def test_rows(shape: tuple[int, ...], vector_bytes: int) -> None:
    n = shape[-1]
    check(softmax, {"x": random(*shape)}, vector_bytes=vector_bytes)
    check(normalized, {"x": random(*shape), "s": random(n), "b": random(n)}, vector_bytes=vector_bytes, threads=2)
    check(lambda x: softmax(tanh(x)) * tanh(x), {"x": random(*shape)}, vector_bytes=vector_bytes)
    check(lambda x, y: softmax(x + y) * y, {"x": random(*shape), "y": random(n)}, vector_bytes=vector_bytes)


def test_softmax_and_normalization_are_one_kernel_each() -> None:
    assert kernels_of(softmax, {"x": random(8, 64)}) == ["rows"]
    assert kernels_of(normalized, {"x": random(8, 64), "s": random(64), "b": random(64)}) == ["rows"]


def test_rows_of_other_kernels_stay_separate() -> None:
    """A sum that is used outside its own row is not fused into a kernel of rows."""
    x = random(64, 64)
    with_transposed_sum = lambda x: x * transpose(sum(x, axis=-1, keepdims=True), perm=(1, 0))  # noqa: E731
    check(with_transposed_sum, {"x": x})
    check(lambda x: transpose(softmax(x), perm=(1, 0)) + softmax(x), {"x": x})


def test_special_values_in_rows() -> None:
    x = random(4, 40)
    x[0, 3], x[1, 5], x[2] = np.nan, np.inf, -np.inf
    graph = graph_of(softmax, {"x": x})
    actual = run(graph, {"x": x}, Machine(machine_code.host_cpu(), 1))
    with np.errstate(invalid="ignore"):
        np.testing.assert_allclose(actual, np.asarray(softmax(x)), rtol=1e-5)


# -- transposes ---------------------------------------------------------------------------------------------------
@WIDTHS
@pytest.mark.parametrize(
    "shape, perm",
    [
        ((32, 48), (1, 0)),
        ((37, 50), (1, 0)),
        ((3, 20, 33), (0, 2, 1)),
        ((20, 3, 18), (2, 1, 0)),
        ((17, 2, 19), (2, 0, 1)),
    ],
)
def test_transposes(shape: tuple[int, ...], perm: tuple[int, ...], vector_bytes: int) -> None:
    check(lambda x: transpose(x, perm=perm), {"x": random(*shape)}, vector_bytes=vector_bytes, threads=2)
    check(lambda x, y: transpose(x * y + 1.0, perm=perm), {"x": random(*shape), "y": random(shape[-1])})


def test_a_transpose_of_no_axes() -> None:
    check(lambda x: transpose(x, perm=()) + 1.0, {"x": np.array(2.0, np.float32)})


# -- in C ---------------------------------------------------------------------------------------------------------
@pytest.mark.skipif(not (shutil.which("gcc") and shutil.which("make")), reason="no C compiler")
@pytest.mark.parametrize("constant", [False, True])
def test_exported_c_has_the_same_schedules(tmp_path: Path, constant: bool) -> None:
    x = IOKey("input")
    h: Any = Relu()(Conv2d(16, 24, kernel_size=3, padding=1, name="c1")(x))
    h = Relu()(Conv2d(24, 32, kernel_size=3, stride=2, padding=1, name="c2")(h))
    h = Conv2d(32, 48, kernel_size=1, name="c3")(h)
    h = Conv2d(48, 64, kernel_size=3, stride=3, padding=1, name="c4")(h)
    h = softmax_layer(Linear(64, name="l")(reshape(h, shape=(8, 32))), axis=-1)
    h = transpose(tanh(h * 2.0), perm=(1, 0))
    model = Model.create(inputs=x, outputs=matmul(h, transpose(h, perm=(1, 0))))
    options = {"static_inference": True} if constant else {"inference": True}
    compiled = ml.compile(model, "c", shapes={"input": [1, 16, 12, 12]}, **options)
    compiled.bind(compiled.randomize_params(0))
    compiled.evaluate({"input": random(1, 16, 12, 12)})
    compiled.export(tmp_path)
    subprocess.run(["make", "model_test"], cwd=tmp_path, check=True, capture_output=True)
    subprocess.run(["./model_test"], cwd=tmp_path, check=True, capture_output=True)


# -- the driver ---------------------------------------------------------------------------------------------------
def llvm(graph: Graph) -> tuple[programs.Program, str]:
    """Return the program of a graph and its optimized LLVM IR."""
    machine = Machine(machine_code.host_cpu(), 1)
    program = programs.write(graph, machine)
    functions = {n: f.primfunc for n, f in program.functions.items()} | {programs.DRIVE: program.driver}
    return program, machine_code.listing(machine_code.compiled(functions, {}, machine.cpu, 1), "ll")


def test_kernels_are_called_not_inlined() -> None:
    """A driver into which every call's kernel was copied took LLVM quadratic time."""

    def layers(x: Any, w: Any) -> Any:
        for _ in range(30):
            x = maximum(matmul(x, w), 0.0)
        return x

    graph = graph_of(layers, {"x": random(8, 16), "w": random(16, 16)})
    program, listing = llvm(graph)
    (name,) = program.kernels
    assert len(re.findall(rf"call [^\n]*@{name}\(", listing)) == 30


def test_llvm_interleaves_no_short_vectors() -> None:
    """LLVM ended the process for lack of an instruction that joins selections of short vectors."""
    with Builder() as b:
        x, update = (b.input(n, shape, bfloat16) for n, shape in (("x", (4, 5)), ("update", (2, 3))))
        result = dynamic_update_slice(x, update, b.input("starts", (2,), int32))
    _, listing = llvm(b.build({"y": result}))
    assert "interleaved.vec" not in listing
