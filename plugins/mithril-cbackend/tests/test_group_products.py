"""Products with values quantized in groups: every set of instructions, layout and number of rows, and C."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import in_c
import ml_dtypes
import numpy as np
import pytest
from test_int8x4 import MACHINES, runs

import mithril as ml
from mithril import ops
from mithril.graph import Builder, Dim, Graph, decompose, evaluate
from mithril_cbackend.compile_target import CompileTarget
from mithril_cbackend.graph import integer_products
from mithril_cbackend.graph.group_products import PACKED_BLOCKS, GroupProducts
from mithril_cbackend.lowering.int8x4.group_operation import block_matrix
from mithril_cbackend.lowering.int8x4.group_packed_blocks import packed_blocks_of, packed_blocks_of_blocks, unpacked
from mithril_cbackend.program import compile_graph
from mithril_gguf.formats import FORMATS
from mithril_gguf.matrix import BlockMatrix
from mithril_passes.quantization.groups import CODEBOOKS

RNG = np.random.default_rng(0)
UNEVEN = np.sort(RNG.uniform(-1, 1, 16)).astype(np.float32)
INTEGERS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
HALVES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
# rows, terms, columns, group, offset, scales of 16 bits, signed bytes on the left, table
CASES = {
    "one row": (1, 96, 70, 32, False, True, False, UNEVEN),
    "offset": (2, 128, 40, 64, True, True, False, INTEGERS),
    "rows": (19, 128, 33, 16, True, False, False, UNEVEN),
    "bytes": (1, 256, 70, 32, False, True, True, INTEGERS),
    "bytes, offset": (11, 256, 64, 128, True, True, True, INTEGERS),
    "bytes, halves": (3, 64, 20, 8, False, False, True, HALVES),
}


# format of a file, rows, signed bytes on the left; with offsets, nested scales, quantized values of 4 and 8 bits
FORMATS_READ = {
    "q4_0": (1, False),
    "q4_1": (3, True),
    "q5_1": (9, False),
    "q8_0": (1, True),
    "mxfp4": (2, True),
    "q2_k": (1, True),
    "q4_k": (1, False),
    "q5_k": (11, True),
    "q6_k": (2, False),
    "iq4_xs": (2, False),
}


def blocks_of(name: str, rows: int, terms: int) -> Any:
    """Return random rows of blocks whose factors are finite."""
    kind = FORMATS[name]
    data = RNG.integers(0, 256, (rows, kind.row(terms)), np.uint8)
    blocks = kind.blocks(data)
    factors = np.float16(RNG.uniform(0.001, 0.01, (*blocks.shape[:2], 2))).view(np.uint8)
    places = {"q2_k": (80, 82), "q6_k": (208,), "q4_1": (0, 2), "q5_1": (0, 2), "q4_k": (0, 2), "q5_k": (0, 2)}
    for k, place in enumerate(places.get(name, (0,))):
        blocks[..., place : place + 2] = factors[..., 2 * k : 2 * k + 2]
    if name == "mxfp4":
        blocks[..., 0] = RNG.integers(120, 126, blocks.shape[:2])
    return data


def graph_of_file(name: str) -> Graph:
    """Multiply by 70 rows of a file in another order, and look some of them up."""
    m, is_bytes = FORMATS_READ[name]
    with Builder() as b:
        x: Any = b.input("x", (m, 512), "float32")
        if is_bytes:
            s = ops.max(ops.abs(x), axis=-1) * (1 / 127)
            x = ops.dequantize(ops.quantize(x, s, dtype="int8", axis=0), s, axis=0)
        quantized = b.constant(blocks_of(name, 70, 512), name="quantized")
        order = [b.constant(RNG.permutation(70), name="order")] if m > 1 else []
        w = block_matrix(quantized, *order, format=name)
        y = ops.matmul(x, ops.transpose(w, perm=(1, 0)))
        rows = ops.take(w, b.constant(np.array([3, 69, -70]), name="i"), axis=0)
    return b.build({"y": y, "rows": rows})


def graph_of(case: str) -> Graph:
    if case in FORMATS_READ:
        return graph_of_file(case)
    m, k, n, group, offset, half, is_bytes, table = CASES[case]
    kind = np.float16 if half else np.float32
    with Builder() as b:
        x: Any = b.input("x", (m, k), "float32")
        if is_bytes:
            s = ops.max(ops.abs(x), axis=-1) * (1 / 127)
            x = ops.dequantize(ops.quantize(x, s, dtype="int8", axis=0), s, axis=0)
        operands = [
            b.constant(RNG.integers(0, 256, (n, k // 2), np.uint8), name="quantized"),
            b.constant(table, name="t"),
        ]
        operands.append(b.constant(RNG.uniform(0.01, 0.02, (n, k // group)).astype(kind), name="scale"))
        if offset:
            operands.append(b.constant(RNG.uniform(-0.1, 0.1, (n, k // group)).astype(kind), name="offset"))
        y = ops.matmul(x, ops.transpose(ops.dequantize_groups(*operands), perm=(1, 0)))
        result = ops.maximum(y + b.constant(np.linspace(-1, 1, n, dtype=np.float32), name="bias"), -0.5)
    return b.build({"y": result})


def check(case: str, machine: Any) -> tuple[Any, Any, Any]:
    graph = graph_of(case)
    inputs = {"x": RNG.standard_normal(graph.input("x").type.shape).astype(np.float32)}
    results = evaluate(graph, inputs)
    reference = results["y"]
    executable = compile_graph.compiled(integer_products.fused(decomposed(graph), machine), machine, CompileTarget())
    assert "groups_" in executable.source
    computed = executable({}, inputs)
    np.testing.assert_allclose(computed["y"], reference, rtol=1e-5, atol=1e-5 * np.abs(reference).max())
    if "rows" in results:
        np.testing.assert_allclose(computed["rows"], results["rows"], rtol=1e-6, atol=1e-6)  # one fused rounding
    return executable, inputs, reference


def decomposed(graph: Graph) -> Graph:
    """Return the graph as the backend receives it."""
    return decompose(graph, ml.CBackend().lowers, "c")


PRINTED = ("all", "32 bytes", "16 bytes")  # also as C


@pytest.mark.parametrize("name", MACHINES)
def test_machine_code_and_printed_c_agree_on_every_set_of_instructions(name: str, tmp_path: Path) -> None:
    machine = MACHINES[name]
    if not runs(machine):
        pytest.skip(f"this machine cannot run code for {machine.cpu}")
    formats = ["q4_k", "q5_k", "q6_k", "q8_0"] if name == "all" else ["q5_k"]
    cases = [check(case, machine) for case in (*CASES, *formats)]
    if name not in PRINTED:
        return
    if shutil.which("gcc") is None:
        pytest.skip("printed C requires gcc")
    library = in_c.library(tmp_path / "groups.so", [e.program for e, _, _ in cases], machine.lanes())
    for k, (executable, inputs, reference) in enumerate(cases):
        result = in_c.call(executable, getattr(library, f"entry_{k}"), inputs)["y"]
        np.testing.assert_allclose(result, reference, rtol=1e-5, atol=1e-5 * np.abs(reference).max())


@pytest.mark.skipif(shutil.which("gcc") is None, reason="requires gcc")
def test_printed_c_joins_quantized_values_within_range(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Quantized values of 5 and 6 bits become bytes without an overflow of signed integers."""
    machine = MACHINES["16 bytes"]
    if not runs(machine):
        pytest.skip(f"this machine cannot run code for {machine.cpu}")
    cases = [check(case, machine) for case in ("q5_k", "q6_k")]
    programs = [executable.program for executable, _, _ in cases]
    library = in_c.library(
        tmp_path / "checked.so", programs, machine.lanes(), overflow="-fsanitize=signed-integer-overflow"
    )
    for k, (executable, inputs, _) in enumerate(cases):
        in_c.call(executable, getattr(library, f"entry_{k}"), inputs)
    assert "runtime error" not in capfd.readouterr().err


def test_packed_blocks_hold_the_numbers() -> None:
    quantized = RNG.integers(0, 256, (70, 48), np.uint8)
    scale = RNG.uniform(0.1, 1, (70, 3)).astype(np.float32)
    for kind in (np.float16, np.float32):
        for offset in (None, RNG.uniform(-1, 1, (70, 3)).astype(kind)):
            packed_blocks = packed_blocks_of(quantized, scale.astype(kind), offset)
            assert packed_blocks.is_half == (kind is np.float16)
            reference = ops.dequantize_groups(quantized, UNEVEN, scale.astype(kind), offset)
            np.testing.assert_array_equal(unpacked(packed_blocks, UNEVEN), reference)


@pytest.mark.parametrize("name", sorted(FORMATS_READ))
def test_packed_blocks_of_files_hold_the_numbers(name: str) -> None:
    """Pack without rounding, and with about as few bytes as the file has."""
    kind, data, order = FORMATS[name], blocks_of(name, 70, 512), RNG.permutation(70)
    table = np.zeros(16, np.float32) if kind.table is None else kind.table[:16]
    packed_blocks = packed_blocks_of_blocks(kind, data, order, 1.0)
    np.testing.assert_array_equal(unpacked(packed_blocks, table), kind.decoded(data[order]))
    bits = {"q5_1": 6, "q5_k": 5.65, "q6_k": 6.6, "q2_k": 5.2, "q4_k": 4.65, "iq4_xs": 4.35, "mxfp4": 4.5}
    assert 8 * len(packed_blocks.data) / (96 * 512) <= bits.get(name, 8 * kind.bytes / kind.block)


@pytest.mark.parametrize(("name", "place"), [("q4_k", 0), ("q4_k", 2), ("q8_0", 0), ("mxfp4", 0)])
@pytest.mark.parametrize("number", [np.inf, np.nan])
def test_factors_of_files_that_are_not_finite_stay_so(name: str, place: int, number: float) -> None:
    """Decode such a file, because packed blocks move the bits of its factors as those of finite numbers."""
    data = blocks_of(name, 40, 512)
    if name == "mxfp4":
        data[3, place] = 255
    else:
        data[3, place : place + 2] = np.float16([number]).view(np.uint8)
    expected = FORMATS[name].decoded(data)
    assert not np.isfinite(expected[3]).all()
    with Builder() as b:
        w = block_matrix(b.constant(data, name="quantized"), format=name)
        y = ops.matmul(b.input("x", (2, 512), "float32"), ops.transpose(w, perm=(1, 0)))
        rows = ops.take(w, b.constant(np.array([2, 3]), name="i"), axis=0)
    x = RNG.uniform(1, 2, (2, 512)).astype(np.float32)
    results = ml.compile(b.build({"y": y, "rows": rows}), "c", inference=True)({"x": x})
    np.testing.assert_allclose(results["rows"], expected[2:4], rtol=1e-6)
    assert not np.isfinite(results["y"][:, 3]).any()
    columns = np.delete(np.arange(40), 3)
    np.testing.assert_allclose(results["y"][:, columns], x @ expected[columns].T, rtol=1e-4, atol=1e-3)


def test_programs_of_other_sizes_share_packed_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pack quantized values once, also in an order that each program copies, and again in another one."""
    data = blocks_of("q8_0", 40, 64)
    data.setflags(write=False)
    packed = []
    compute = GroupProducts.packed

    def recorded(self: GroupProducts, *arguments: Any) -> Any:
        result = compute(self, *arguments)
        packed.append(result[1].data)
        return result

    monkeypatch.setattr(GroupProducts, "packed", recorded)
    order = RNG.permutation(40)
    x = RNG.standard_normal((3, 64)).astype(np.float32)
    for rows, selected in ((1, order), (3, order), (3, order[::-1])):
        model = ml.Model()
        model += ml.models.Linear(40, bias=False, name="a")
        model.pretrained = {"a.weight": BlockMatrix(data, FORMATS["q8_0"], (40, 64), selected)}
        compiled = ml.compile(model, "c", shapes={"input": [rows, 64]}, inference=True, static_inference=True)
        expected = x[:rows] @ FORMATS["q8_0"].decoded(data[selected]).T
        np.testing.assert_allclose(compiled({"input": x[:rows]})["output"], expected, rtol=1e-4, atol=1e-4)
    assert [p is packed[0] for p in packed] == [True, True, False]
    assert len(PACKED_BLOCKS.results_of(data)) >= 2


@pytest.mark.parametrize("name", ["iq4_nl", "mxfp4"])
def test_codebooks_of_files_are_those_of_quantization(name: str) -> None:
    expected = np.array(CODEBOOKS[name], np.float32)
    assert FORMATS[name].table.tobytes() == expected.tobytes()  # the sign of zero, too


def test_matrices_of_files_without_elements() -> None:
    for rows, columns in ((3, 0), (0, 64), (0, 0)):
        for kind in FORMATS.values():
            quantized = np.zeros((rows, kind.row(columns * 4)), np.uint8)
            matrix = BlockMatrix(quantized, kind, (rows, columns * 4))
            assert np.asarray(matrix).shape == kind.decoded(quantized).shape == (rows, columns * 4)


def test_tables_of_quantized_values_are_read_by_row() -> None:
    """Store the table of an embedding that is the head as well once as quantized values, and once as packed blocks."""
    quantized, scale = RNG.integers(0, 256, (2000, 32), np.uint8), RNG.uniform(0.1, 1, (2000, 2)).astype(np.float16)
    with Builder() as b:
        numbers = [b.constant(x, name=n) for x, n in ((quantized, "quantized"), (UNEVEN, "table"), (scale, "scale"))]
        table = ops.dequantize_groups(*numbers)
        x = ops.take(table, b.input("i", (1, 3), "int64"), axis=0)
        y = ops.matmul(ops.cast(x, dtype="bfloat16"), ops.cast(ops.transpose(table, perm=(1, 0)), dtype="bfloat16"))
    graph = b.build({"x": x, "y": y})
    compiled = ml.compile(graph, "c", inference=True)
    inputs = {"i": np.array([[0, 1999, 7]])}
    results, reference = compiled(inputs), evaluate(graph, inputs)
    np.testing.assert_array_equal(results["x"], reference["x"])
    assert results["y"].dtype == ml_dtypes.bfloat16
    error = results["y"].astype(np.float32) - reference["y"].astype(np.float32)
    assert np.linalg.norm(error) < 0.01 * np.linalg.norm(reference["y"].astype(np.float32))
    stored = compiled.programs[-1].executable.layout.constants.values()
    assert sum(x.nbytes for x in stored) < 3 * (quantized.nbytes + scale.nbytes)


def test_computed_quantized_values_are_converted() -> None:
    with Builder() as b:
        x, quantized = b.input("x", (4, 64), "float32"), b.input("quantized", (40, 32), "uint8")
        w = ops.dequantize_groups(quantized, b.constant(UNEVEN, name="t"), b.input("s", (40, 2), "float32"))
        y = ops.matmul(x, ops.transpose(w, perm=(1, 0)))
    graph = b.build({"y": y})
    inputs = {
        "x": RNG.standard_normal((4, 64)).astype(np.float32),
        "quantized": RNG.integers(0, 256, (40, 32), np.uint8),
    }
    inputs["s"] = RNG.uniform(0.1, 1, (40, 2)).astype(np.float32)
    np.testing.assert_allclose(ml.compile(graph, "c")(inputs)["y"], evaluate(graph, inputs)["y"], rtol=1e-4, atol=1e-4)


def test_one_program_runs_all_batches() -> None:
    rng = np.random.default_rng(0)
    quantized, table = rng.integers(0, 256, (48, 32), np.uint8), np.arange(-8, 8, dtype=np.float32)
    scale = rng.standard_normal((48, 2)).astype(np.float16)
    with Builder() as b:
        x = b.input("x", (Dim("n", 1), 64))
        parts = {"quantized": quantized, "table": table, "scale": scale}
        w = ops.dequantize_groups(*(b.constant(array, name=name) for name, array in parts.items()))
        compiled = ml.compile(b.build({"y": ops.linear(x, w)}), "c", inference=True)
    halves = np.stack([quantized & 15, quantized >> 4], axis=-1).reshape(48, 2, 32)
    numbers = (table[halves] * scale.astype(np.float32)[..., None]).reshape(48, 64)
    for n in (1, 3, 9, 3):
        x = rng.standard_normal((n, 64)).astype(np.float32)
        np.testing.assert_allclose(compiled({"x": x})["y"], x @ numbers.T, rtol=1e-4, atol=1e-4)
    assert len(compiled.programs) == 1


@pytest.mark.parametrize("zero", [False, True])
def test_onnx_files_with_4_bit_weights_multiply_quantized_values(zero: bool) -> None:
    onnx, runtime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    pytest.importorskip("mithril_onnx")
    helper, to_tensor = onnx.helper, onnx.numpy_helper.from_array
    arrays = {"w": RNG.integers(0, 256, (70, 3, 16), np.uint8), "s": RNG.uniform(0.01, 0.02, 210).astype(np.float32)}
    if zero:
        arrays["z"] = RNG.integers(0, 256, (70, 2), np.uint8)
    sizes = {"K": 96, "N": 70, "bits": 4, "block_size": 32}
    node = helper.make_node("MatMulNBits", ["x", *arrays], ["y"], domain="com.microsoft", **sizes)
    x, y = (helper.make_tensor_value_info(n, 1, [2, k]) for n, k in (("x", 96), ("y", 70)))
    graph = helper.make_graph([node], "g", [x], [y], [to_tensor(a, n) for n, a in arrays.items()])
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    inputs = {"x": RNG.standard_normal((2, 96)).astype(np.float32)}
    session = runtime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    compiled = ml.compile(ml.from_onnx(model), "c", static_inference=True)
    np.testing.assert_allclose(compiled(inputs)["y"], session.run(None, inputs)[0], rtol=1e-4, atol=1e-4)
    assert "groups_floats" in compiled.source
