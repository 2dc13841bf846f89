"""Products by 32-bit int8x4 groups, bfloat16 and bytes: every set of instructions, any size, machine code and C."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import in_c
import ml_dtypes
import numpy as np
import pytest

import mithril as ml
from mithril import ops
from mithril.graph import Builder, Graph, Input, evaluate
from mithril.graph.dtypes import dtype as as_dtype
from mithril.models import Conv2d, Flatten, Linear, Relu
from mithril.ops import cast, matmul, maximum, transpose
from mithril_cbackend.compile_target import CompileTarget
from mithril_cbackend.graph import integer_products
from mithril_cbackend.lowering.element.kernel_builder import Machine
from mithril_cbackend.program import compile_graph, program as programs
from mithril_cbackend.tir import machine_code

RNG = np.random.default_rng(0)
HOST = machine_code.host_cpu()
HERE = machine_code.selected_features(None)
NO_TILES = tuple(f for f in HERE if not f.startswith("amx"))
MACHINES = {
    "all": Machine(HOST, 1, features=HERE),
    "no tiles": Machine(HOST, 1, features=NO_TILES),
    "no dot products": Machine(HOST, 1, features=tuple(f for f in NO_TILES if f in ("avx512bw", "avx2", "sse2"))),
    "plain": Machine(HOST, 1),
    "32 bytes": Machine("x86-64-v3", 1, 32, features=("avx2", "sse2")),
    "16 bytes": Machine("x86-64", 1, 16, features=("sse2",)),
    "16 bytes, plain": Machine("x86-64", 1, 16),
    "no vectors": Machine("x86-64", 1, 4),
    "two threads": Machine(HOST, 2, features=HERE),
}
Array = np.ndarray[Any, Any]
BF16 = ml_dtypes.bfloat16


def runs(machine: Machine) -> bool:
    return machine.vector_bytes <= 64 and (HOST == machine.cpu or not machine_code.missing_features(machine.cpu))


def operands(m: int, k: int, n: int, kind: str, layout: str) -> tuple[Array, Array]:
    shape = (n, k) if layout == "NT" else (k, n)
    if kind == "bytes":
        return RNG.integers(0, 256, (m, k), np.uint8), RNG.integers(-128, 128, shape, np.int8)
    return RNG.standard_normal((m, k)).astype(BF16), RNG.standard_normal(shape).astype(BF16)


def graph_of(x: Array, w: Array, layout: str, constant: bool) -> Graph:
    sum_dtype = "int32" if x.dtype == np.uint8 else "float32"
    with Builder() as b:
        left, right = b.input("x", x.shape, as_dtype(x.dtype)), b.input("w", w.shape, as_dtype(w.dtype))
        packed_block = (
            transpose(cast(right, dtype=sum_dtype), perm=(1, 0)) if layout == "NT" else cast(right, dtype=sum_dtype)
        )
        product = matmul(cast(left, dtype=sum_dtype), packed_block)
        result = maximum(product, 100 if sum_dtype == "int32" else 0.5)
    graph = b.build({"y": result})
    if not constant:
        return graph
    inputs = tuple(Input(i.value, "constant", w) if i.name == "w" else i for i in graph.inputs)
    return graph.replaced(inputs=inputs)


def expected(x: Array, w: Array, layout: str) -> Array:
    sum_dtype = np.int32 if x.dtype == np.uint8 else np.float64
    product = x.astype(sum_dtype) @ (w.T if layout == "NT" else w).astype(sum_dtype)
    return np.maximum(product, 100 if sum_dtype is np.int32 else 0.5)


def check(machine: Machine, m: int, k: int, n: int, kind: str, layout: str, constant: bool) -> Any:
    x, w = operands(m, k, n, kind, layout)
    executable = compile_graph.compiled(graph_of(x, w, layout, constant), machine, CompileTarget())
    inputs = {"x": x} if constant else {"x": x, "w": w}
    result, reference = executable({}, inputs)["y"], expected(x, w, layout)
    if kind == "bytes":
        np.testing.assert_array_equal(result, reference)
    else:
        np.testing.assert_allclose(result, reference, rtol=1e-5, atol=1e-5 * np.sqrt(k) * 10)
    return executable, inputs, reference


@pytest.mark.parametrize("kind", ["bytes", "pairs"])
@pytest.mark.parametrize("name", MACHINES)
def test_products_agree_on_every_set_of_instructions(name: str, kind: str) -> None:
    machine = MACHINES[name]
    if not runs(machine):
        pytest.skip(f"this machine cannot run code for {machine.cpu}")
    grid, diagonal = [("NN", False), ("NN", True), ("NT", False), ("NT", True)], [("NN", False), ("NT", True)]
    for (m, k, n), layouts in {(1, 101, 70): diagonal, (40, 128, 64): diagonal, (70, 103, 37): grid}.items():
        for layout, constant in layouts:
            executable, _, _ = check(machine, m, k, n, kind, layout, constant)
            by_int8x4 = constant or (m > 8 and n >= machine.lanes())
            int8x4s = "dot_u8s8" if kind == "bytes" else "dot_bf16"
            assert (int8x4s in executable.source) == (by_int8x4 and (kind == "bytes" or machine.lanes() > 1))


@pytest.mark.parametrize(("kind", "instruction"), [("bytes", "vpdpbusd"), ("pairs", "vdpbf16ps")])
def test_tiles_keep_their_sums_in_registers(kind: str, instruction: str) -> None:
    """Constants of a long epilogue, loaded before the loops, would take the registers of the sums."""
    machine = Machine("cooperlake", 1, features=("avx512bf16", "avx512bw", "avx512vnni"))
    if machine.cpu not in machine_code.cpu_names():
        pytest.skip("LLVM does not compile for x86 here")
    x, w = operands(16, 64, 64, kind, "NN")
    sum_dtype = "int32" if kind == "bytes" else "float32"
    with Builder() as b:
        sums = matmul(
            cast(b.input("x", x.shape, as_dtype(x.dtype)), dtype=sum_dtype), cast(b.constant(w), dtype=sum_dtype)
        )
        result = ops.erf(cast(sums, dtype="float32") * 0.01)
    program = programs.write(integer_products.fused(b.build({"y": result}), machine), machine)
    functions = {n: f.primfunc for n, f in program.functions.items()}
    code = machine_code.compiled(functions, {}, machine.cpu, 1, machine.features)
    lines = machine_code.listing(code, "asm").splitlines()
    steps = [k for k, line in enumerate(lines) if instruction in line]
    assert len(steps) == 16
    assert any("prefetch" in line for line in lines[steps[0] : steps[-1] + 20])
    assert not [line for line in lines[steps[0] : steps[-1]] if "zmm" in line and "(%rsp)" in line]


def test_rows_outside_the_cache() -> None:
    machine = replace(MACHINES["all"], cache=1 << 12)
    for machine_ in (machine, replace(machine, threads=2)):
        check(machine_, 100, 256, 200, "bytes", "NN", True)
        check(machine_, 100, 256, 200, "pairs", "NT", False)


def test_extreme_bytes_are_exact() -> None:
    """Products of the largest bytes overflow the 16-bit sums of instructions that saturate."""
    for machine in filter(runs, MACHINES.values()):
        x, w = np.full((9, 64), 255, np.uint8), np.full((64, 32), -128, np.int8)
        executable = compile_graph.compiled(graph_of(x, w, "NN", True), machine, CompileTarget())
        np.testing.assert_array_equal(executable({}, {"x": x})["y"], np.full((9, 32), 100))
        executable = compile_graph.compiled(graph_of(x, -w - 1, "NN", True), machine, CompileTarget())
        np.testing.assert_array_equal(executable({}, {"x": x})["y"], np.full((9, 32), 255 * 127 * 64))


def away_from_halves(shape: tuple[int, ...], scale: float) -> Array:
    """Return numbers that are quantized to equal values, whether a program divides by the scale or multiplies."""
    quantized = np.rint(RNG.standard_normal(shape) / scale)
    return ((quantized + RNG.uniform(-0.4, 0.4, shape)) * scale).astype(np.float32)


# -- quantize and dequantize --------------------------------------------------------------------------------------
def pairs_graph(kind: str, layout: str, zero: int, by_row: bool = False) -> Graph:
    """Return a product of dequantized operands that is quantized again."""
    quantized = RNG.integers(-127, 128, (70, 101) if layout == "NT" else (101, 70), np.int8)
    scale = RNG.uniform(0.01, 0.02, 70).astype(np.float32)
    with Builder() as b:
        x = b.input("x", (40, 101), "float32")
        if by_row:
            s: Any = ops.max(ops.abs(x), axis=-1) * (1 / 127)
            left = ops.dequantize(ops.quantize(x, s, dtype="int8", axis=0), s, axis=0)
        else:
            s, z = b.constant(0.02, "float32"), b.constant(zero, "int32")
            left = ops.dequantize(ops.quantize(x, s, z, dtype=kind), s, z)
        points = b.constant(np.zeros(70, np.int8), name="zero")  # as ONNX files have them
        scales = b.constant(scale, name="s")
        w = ops.dequantize(b.constant(quantized, name="w"), scales, points, axis=0 if layout == "NT" else 1)
        y = maximum(matmul(left, transpose(w, perm=(1, 0)) if layout == "NT" else w), 0.0)
        q = ops.quantize(y, b.constant(0.5, "float32"), dtype="uint8")
    return b.build({"y": y, "q": q})


@pytest.mark.parametrize(
    ("kind", "layout", "zero", "by_row"),
    [("uint8", "NT", 128, False), ("uint8", "NN", 0, False), ("int8", "NT", -3, False), ("int8", "NN", 0, True)],
)
def test_dequantized_operands_are_multiplied_as_bytes(kind: str, layout: str, zero: int, by_row: bool) -> None:
    graph = pairs_graph(kind, layout, zero, by_row)
    x = away_from_halves((40, 101), 0.02)
    reference = evaluate(graph, {"x": x})
    compiled = ml.compile(graph, "c")
    results = compiled({"x": x})
    assert "dot_u8s8" in compiled.source
    np.testing.assert_allclose(results["y"], reference["y"], atol=1e-6 * np.abs(reference["y"]).max())
    assert np.abs(results["q"].astype(int) - reference["q"].astype(int)).max() <= 1
    assert (results["q"] != reference["q"]).mean() < 0.01


def test_computed_quantized_values_stay_numbers() -> None:
    with Builder() as b:
        x, q = b.input("x", (16, 64), "float32"), b.input("q", (64, 32), "int8")
        s = b.constant(0.02, "float32")
        y = matmul(ops.dequantize(ops.quantize(x, s), s), ops.dequantize(q, s))
    graph = b.build({"y": y})
    inputs = {"x": RNG.standard_normal((16, 64)).astype(np.float32), "q": RNG.integers(-9, 9, (64, 32), np.int8)}
    compiled = ml.compile(graph, "c")
    np.testing.assert_allclose(compiled(inputs)["y"], evaluate(graph, inputs)["y"], rtol=1e-5, atol=1e-5)
    assert "dot_u8s8" not in compiled.source


# -- convolutions -------------------------------------------------------------------------------------------------
CONVOLUTIONS = {
    "3x3": ((2, 64, 9, 9), (40, 64, 3, 3), 1, 1),
    "stride 2": ((1, 24, 17, 20), (70, 24, 3, 3), 2, 1),
    "first": ((1, 3, 32, 32), (32, 3, 7, 7), 2, 3),
    "1x1": ((1, 64, 14, 14), (16, 64, 1, 1), 1, 0),
    "wide": ((1, 130, 5, 40), (33, 130, 3, 3), 1, 1),
    "tall": ((1, 8, 70, 40), (16, 8, 3, 3), 1, 0),
}


def convolution_graph(case: str, zero: int, kind: str = "uint8") -> Graph:
    """Return a convolution of quantized values with a residual addition, an activation and the next rounding."""
    image, weights, stride, padding = CONVOLUTIONS[case]
    quantized = RNG.integers(-127, 128, weights, np.int8)
    scale = RNG.uniform(0.001, 0.002, weights[0]).astype(np.float32)
    with Builder() as b:
        x, s, z = b.input("x", image, "float32"), b.constant(0.02, "float32"), b.constant(zero, "int32")
        left = ops.dequantize(ops.quantize(x, s, z, dtype=kind), s, z)
        right = ops.dequantize(b.constant(quantized, name="w"), b.constant(scale, name="s"), axis=0)
        pads = ((padding, padding),) * 2
        y = ops.conv(left, right, stride=(stride, stride), padding=pads, dilation=(1, 1))
        y = y + b.input("r", y.shape, "float32")
        y = ops.relu(y + b.constant(np.linspace(-1, 1, weights[0], dtype=np.float32).reshape(1, -1, 1, 1), name="bias"))
        q = ops.quantize(y, b.constant(0.05, "float32"), dtype="uint8")
    return b.build({"y": y, "q": q})


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_convolutions_multiply_bytes(case: str) -> None:
    for zero, kind in ((0, "uint8"), (100, "uint8"), (0, "int8")):
        graph = convolution_graph(case, zero, kind)
        inputs = {i.name: away_from_halves(i.type.shape, 0.02) for i in graph.with_role("input")}
        reference, compiled = evaluate(graph, inputs), ml.compile(graph, "c")
        results = compiled(inputs)
        assert "dot_u8s8" in compiled.source
        np.testing.assert_allclose(results["y"], reference["y"], atol=1e-5 * np.abs(reference["y"]).max())
        assert np.abs(results["q"].astype(int) - reference["q"].astype(int)).max() <= 1
        assert (results["q"] != reference["q"]).mean() < 0.01


def test_images_with_scales_of_their_own_are_multiplied_as_bytes() -> None:
    model = ml.Model()
    model += Conv2d(9, 21, 3, padding=1, stride=2, groups=3)
    x = RNG.standard_normal((3, 9, 7, 10)).astype(np.float32) * np.array([1, 100, 0], np.float32).reshape(3, 1, 1, 1)
    settings = {"static_inference": True, "quantization": {"activations": "dynamic"}}
    exact = ml.compile(model, "c", shapes={"input": [3, 9, 7, 10]})
    params = exact.randomize_params(seed=0)
    reference = exact.bind(params)({"input": x})["output"]
    for batch in (3, None):
        compiled = ml.compile(model, "c", shapes={"input": [batch, 9, 7, 10]}, **settings).bind(params)
        result = compiled({"input": x})["output"]
        assert "dot_u8s8" in compiled.source
        for a, b in zip(result, reference, strict=True):
            np.testing.assert_allclose(a, b, atol=2e-2 * np.abs(b).max())


def checked_convolution(machine: Machine, case: str = "stride 2") -> Any:
    (_, channels, height, width), weights, stride, padding = CONVOLUTIONS[case]
    x = RNG.integers(0, 256, (1, channels, height, width), np.uint8)
    w = RNG.integers(-128, 128, weights, np.int8)
    settings = {"stride": (stride, stride), "padding": ((padding, padding),) * 2, "dilation": (1, 1)}
    with Builder() as b:
        image, kernels = b.input("x", x.shape, "uint8"), b.constant(w, name="w")
        y = ops.conv(cast(image, dtype="int32"), cast(kernels, dtype="int32"), **settings)
    graph = integer_products.fused(b.build({"y": y}), machine)
    executable = compile_graph.compiled(graph, machine, CompileTarget())
    exact = ops.conv(x.astype(np.float64), w.astype(np.float64), **settings).astype(np.int32)
    np.testing.assert_array_equal(executable({}, {"x": x})["y"], exact)
    return executable, {"x": x}, exact


@pytest.mark.parametrize("name", MACHINES)
def test_convolutions_agree_on_every_set_of_instructions(name: str) -> None:
    machine = MACHINES[name]
    if not runs(machine):
        pytest.skip(f"this machine cannot run code for {machine.cpu}")
    for case in ("wide", "stride 2", "first"):
        checked_convolution(machine, case)


def test_convolutions_of_small_floats_agree_with_the_reference() -> None:
    w = RNG.standard_normal((24, 16, 3, 3)).astype(BF16)
    with Builder() as b:
        x = b.input("x", (1, 16, 20, 20), "bfloat16")
        y = ops.conv(x, b.constant(w, name="w"), stride=(1, 1), padding=((1, 1), (1, 1)), dilation=(1, 1))
    graph = b.build({"y": y})
    inputs = {"x": RNG.standard_normal((1, 16, 20, 20)).astype(BF16)}
    compiled = ml.compile(graph, "c")
    result, reference = compiled(inputs)["y"], evaluate(graph, inputs)["y"]
    assert result.dtype == BF16
    np.testing.assert_allclose(result.astype(np.float32), reference.astype(np.float32), rtol=1e-2, atol=0.05)


# -- C ------------------------------------------------------------------------------------------------------------
@pytest.mark.skipif(shutil.which("gcc") is None, reason="requires gcc")
@pytest.mark.parametrize("name", ["all", "plain", "32 bytes", "16 bytes", "no vectors"])
def test_printed_c_agrees(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    machine = MACHINES[name]
    if not runs(machine):
        pytest.skip(f"this machine cannot run code for {machine.cpu}")
    cases = [check(machine, *sizes, kind, layout, constant) for sizes, kind, layout, constant in (
        ((40, 128, 64), "bytes", "NN", True), ((33, 103, 37), "bytes", "NT", False),
        ((40, 128, 64), "pairs", "NT", True), ((33, 103, 37), "pairs", "NN", False), ((1, 64, 99), "bytes", "NT", True),
    )]  # fmt: skip
    cases.append(checked_convolution(machine))
    overflow = "-fsanitize=shift" if name == "no vectors" else "-fwrapv"
    library = in_c.library(tmp_path / "int8x4s.so", [e.program for e, _, _ in cases], machine.lanes(), overflow)
    for k, (executable, inputs, reference) in enumerate(cases):
        result = in_c.call(executable, getattr(library, f"entry_{k}"), inputs)["y"]
        np.testing.assert_allclose(result, reference, rtol=1e-5, atol=1e-3)
    assert "runtime error" not in capfd.readouterr().err
    if name == "all" and shutil.which("objdump"):
        command = ["objdump", "-d", str(tmp_path / "int8x4s.so")]
        code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        for feature, instruction in {"avx512vnni": "vpdpbusd", "avx512bf16": "vdpbf16ps"}.items():
            assert instruction in code or feature not in machine.features or machine.lanes() != 16


def test_a_table_of_quantized_values_keeps_the_dtype_of_its_scale() -> None:
    """Fold quantized values in the dtype of their scale, a scalar constant of the graph, not of a Python number."""
    rng = np.random.default_rng(1)
    table, weights = (rng.integers(-128, 128, shape).astype(np.int8) for shape in ((8, 16), (16, 16)))

    def pair() -> tuple[Any, Any]:
        return ops.constant(value=0.1, dtype="float32"), ops.constant(value=3, dtype="int8")

    def decoded(quantized: Any) -> Any:
        return ops.dequantize(quantized, *pair(), axis=None)

    with Builder() as b:
        rows = ops.take(decoded(b.constant(table)), b.input("i", (4,), "int64"))
        quantized = ops.quantize(rows, *pair(), dtype="int8", axis=None)
        graph = b.build({"y": ops.matmul(decoded(quantized), decoded(b.constant(weights)))})
    inputs = {"i": np.array([0, 3, 3, 7])}
    expected = evaluate(graph, inputs)
    results = ml.compile(graph, "c", inference=True)(inputs)
    for name, array in expected.items():
        assert np.asarray(results[name]).dtype == np.float32
        np.testing.assert_allclose(np.asarray(results[name]), array, rtol=1e-5, atol=1e-4)


@pytest.mark.skipif(shutil.which("make") is None or shutil.which("gcc") is None, reason="requires make and gcc")
def test_exported_programs_multiply_bytes(tmp_path: Path) -> None:
    """Compare the instructions of this CPU and the portable branch with the machine code."""
    model = ml.Model()
    model += Conv2d(3, 16, 3, padding=1, stride=2, name="image")
    model += Relu()
    model += Flatten(name="pixels")
    model += Linear(16 * 64, 10, name="head")
    shapes = {"input": [1, 3, 16, 16]}
    exact = ml.compile(model, "c", shapes=shapes, inference=True)
    exact.bind(exact.randomize_params(seed=0))
    samples = [{"input": RNG.standard_normal((1, 3, 16, 16)).astype(np.float32)} for _ in range(32)]
    ranges = ml.calibrate_ranges(exact, samples)
    small = ml.compile(model, "c", shapes=shapes, static_inference=True, quantization={"ranges": ranges})
    small.bind(exact.params)
    result, reference = small(samples[0])["output"], exact(samples[0])["output"]
    assert np.linalg.norm(result - reference) < 0.03 * np.linalg.norm(reference)
    small.export(tmp_path / "net", inputs=samples[0], name="net", library=None)
    for architecture in ([], ["ARCH="]):
        subprocess.run(["make", "-C", tmp_path / "net", "clean"], check=True, capture_output=True)
        done = subprocess.run(
            ["make", "-C", tmp_path / "net", "check", *architecture], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
