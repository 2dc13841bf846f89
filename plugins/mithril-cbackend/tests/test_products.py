"""Products by tiles: any axes, any dtype, in parts, with few rows; each against the operation's own reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mithril.graph import Builder, Graph, Input
from mithril.graph.dtypes import dtype as as_dtype
from mithril.ops import cast, dot, matmul, maximum, transpose
from mithril_cbackend import tir
from mithril_cbackend.compile_target import CompileTarget
from mithril_cbackend.lowering.element import kernel_builder
from mithril_cbackend.lowering.element.kernel_builder import Machine
from mithril_cbackend.lowering.matmul.matmul import plan_of, schedules
from mithril_cbackend.lowering.matmul.matmul_form import product_of
from mithril_cbackend.program import compile_graph, program as programs
from mithril_cbackend.tir import machine_code

RNG = np.random.default_rng(0)
BASE = Machine(machine_code.host_cpu(), 1)
SMALL = replace(BASE, cache=1 << 13)  # so small a second cache that sums of a hundred terms come in parts
Array = np.ndarray[Any, Any]


def random(*shape: int, dtype: Any = np.float32) -> Array:
    if np.dtype(dtype).kind in "iu":
        info = np.iinfo(dtype)
        return RNG.integers(info.min, info.max, shape, dtype, endpoint=True)
    return RNG.standard_normal(shape).astype(dtype)


def graph_of(function: Any, arrays: dict[str, Array], constants: tuple[str, ...] = ()) -> Graph:
    with Builder() as b:
        result = function(*(b.input(n, a.shape, as_dtype(a.dtype)) for n, a in arrays.items()))
    graph = b.build({"y": result})
    inputs = [Input(i.value, "constant", arrays[i.name], i.tags) if i.name in constants else i for i in graph.inputs]
    return graph.replaced(inputs=tuple(inputs))


def check(
    function: Any, *given: Array, machine: Machine = BASE, constants: tuple[str, ...] = (), rtol: float = 2e-5
) -> None:
    arrays = {f"x{k}": a for k, a in enumerate(given)}
    executable = compile_graph.compiled(graph_of(function, arrays, constants), machine, CompileTarget())
    actual = np.array(executable({}, {n: a for n, a in arrays.items() if n not in constants})["y"])
    expected = np.asarray(function(*given))
    assert actual.dtype == expected.dtype
    if actual.dtype.kind in "iu":
        np.testing.assert_array_equal(actual, expected)
    else:
        reference = expected.astype(np.float64)
        np.testing.assert_allclose(
            actual.astype(np.float64), reference, rtol=rtol, atol=rtol * float(np.abs(reference).max())
        )


@pytest.fixture(autouse=True)
def _threads_share_small_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_builder, "PARALLEL_WORK", 1)


def turned(x: Any) -> Any:
    rank = len(x.shape)
    return transpose(x, perm=(*range(rank - 2), rank - 1, rank - 2))


# -- parts --------------------------------------------------------------------------------------------------------
LAYOUTS = {
    "NN": lambda x, w: matmul(x, w),
    "NT": lambda x, w: matmul(x, turned(w)),
    "TN": lambda x, w: matmul(turned(x), w),
    "TT": lambda x, w: matmul(turned(x), turned(w)),
}


def operands(layout: str, m: int, k: int, n: int, *batch: int, dtype: Any = np.float32) -> tuple[Array, Array]:
    left, right = (m, k) if layout[0] == "N" else (k, m), (k, n) if layout[1] == "N" else (n, k)
    return random(*batch, *left, dtype=dtype), random(*batch, *right, dtype=dtype)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_long_sums_come_in_parts(layout: str, threads: int) -> None:
    machine, product = replace(SMALL, threads=threads), LAYOUTS[layout]
    check(lambda x, w: maximum(product(x, w) + 1.0, 0.0), *operands(layout, 20, 256, 70), machine=machine)
    check(product, *operands(layout, 17, 333, 200), machine=machine)
    check(product, *operands(layout, 12, 200, 40, 2, 3), machine=machine)


def test_the_second_cache_says_how_long_a_part_is() -> None:
    graph = graph_of(matmul, {"x": random(64, 4096), "w": random(4096, 64)})
    (kernel,) = programs.write(graph, BASE).kernels.values()
    product = product_of(kernel.anchor)
    assert product is not None
    depths = [plan_of(product, kernel, replace(BASE, cache=1 << bits)).depth for bits in (18, 19, 24)]
    assert depths[0] < depths[1] < depths[2] == 4096


def test_threads_wait_for_each_other_once() -> None:
    """However many parts a sum has, unless rows are copied for all of them."""
    for layout in ("NN", "NT"):
        arrays = dict(zip("xw", operands(layout, 64, 2000, 128), strict=True))
        program = programs.write(graph_of(LAYOUTS[layout], arrays), replace(SMALL, threads=2))
        (function,) = (program.functions[n] for n in program.kernels)
        assert tir.text(function.primfunc).count("T.parallel(") == 1


def test_vectors_of_a_tile_are_one_loop() -> None:
    """TVM's pass over loops of vectors takes as long for each as writing one."""
    graph = graph_of(lambda x, w: maximum(x @ w, 0.0), {"x": random(24, 512), "w": random(512, 64)})
    (function,) = programs.write(graph, BASE).functions.values()
    assert tir.text(function.primfunc).count("T.vectorized(") <= 8


def test_partial_sums_are_stored_in_the_result_or_separately() -> None:
    arrays = {"x": random(20, 300), "w": random(300, 70)}
    for function, extra in (
        (lambda x, w: matmul(x, w) + 1.0, 0),
        (lambda x, w: cast(matmul(x, w), dtype="float16"), 1),
    ):
        (kernel,) = programs.write(graph_of(function, arrays), SMALL).kernels.values()
        assert [v.name for v in kernel.scratch].count("sums") == extra


def test_rows_are_copied_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    from mithril_cbackend.lowering.matmul import matmul as template

    monkeypatch.setattr(template, "ROWS", 64)
    for threads in (1, 2):
        check(LAYOUTS["TN"], *operands("TN", 200, 150, 200), machine=replace(SMALL, threads=threads))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_schedules_say_how_much_is_summed_at_a_time(dtype: Any) -> None:
    x, w = operands("NN", 12, 600, 40, dtype=dtype)
    (kernel,) = programs.write(graph_of(matmul, {"x": x, "w": w}), BASE).kernels.values()
    product = product_of(kernel.anchor)
    assert product is not None
    parted = [text for text in schedules(kernel.anchor, BASE) if text.count("x") == 2]
    depths = []
    for schedule in parted:
        machine = replace(BASE, schedules={str(product): schedule})
        depths.append(plan_of(product, kernel, machine).depth)
        check(matmul, x, w, machine=machine, rtol=1e-5)
    assert depths == [208, 304, 600]  # of at most 256, 512 and 600: equal parts, whole vectors


def test_known_packed_blocks_are_read_in_parts() -> None:
    check(matmul, *operands("NN", 20, 300, 70), machine=SMALL, constants=("x1",))
    check(LAYOUTS["NT"], *operands("NT", 20, 300, 70), machine=SMALL, constants=("x1",))


# -- dtypes -------------------------------------------------------------------------------------------------------
FLOATS = {np.float16: 2e-3, ml_dtypes.bfloat16: 1e-2, np.float64: 1e-12}


@pytest.mark.parametrize(
    ("layout", "dtype"),  # each layout with a type of 16 bits, whose elements are converted as they are read
    [
        ("NN", np.float16), ("TT", np.float16), ("NT", ml_dtypes.bfloat16), ("TN", ml_dtypes.bfloat16),
        ("NN", np.float64), ("TT", np.float64),
    ],
)  # fmt: skip
def test_other_floats(layout: str, dtype: Any) -> None:
    for m, constants in ((1, ()), (5, ("x1",)), (40, ()), (40, ("x1",))):
        check(LAYOUTS[layout], *operands(layout, m, 50, 70, dtype=dtype), rtol=FLOATS[dtype], constants=constants)
    check(LAYOUTS[layout], *operands(layout, 20, 300, 70, dtype=dtype), rtol=FLOATS[dtype], machine=SMALL)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32", "uint32", "int64", "uint64"])
def test_integers_wrap_around(dtype: str) -> None:
    for layout, m in (("NN", 1), ("NT", 1), ("NN", 40), ("TT", 40)):
        check(LAYOUTS[layout], *operands(layout, m, 50, 70, dtype=np.dtype(dtype)))


def test_narrow_numbers_are_widened_as_they_are_read() -> None:
    """A cast of an operand is fused, and no upcast copy is stored."""
    product_of_cast = lambda x, w: matmul(x, cast(turned(w), dtype="float32"))  # noqa: E731
    for m in (1, 3, 40):
        x, w = random(m, 300), random(70, 300, dtype=np.int8)
        check(product_of_cast, x, w)
        check(product_of_cast, x, w, constants=("x1",))
        program = programs.write(graph_of(product_of_cast, {"x": x, "w": w}), BASE)
        assert program.calls == 1
        assert program.arena < 4 * w.size


# -- axes ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("threads", [1, 2])
def test_dot_over_any_axes(threads: int) -> None:
    machine = replace(BASE, threads=threads)
    cases: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
        ((20, 40), (30, 40), {"contract_a": (1,), "contract_b": (1,)}),
        ((40, 20), (40, 30), {"contract_a": (0,), "contract_b": (0,)}),
        ((6, 7, 8, 9), (8, 9, 20), {"contract_a": (2, 3), "contract_b": (0, 1)}),
        ((6, 7, 8, 9), (9, 8, 20), {"contract_a": (2, 3), "contract_b": (1, 0)}),
        ((6, 8, 7, 9), (20, 8, 5, 9), {"contract_a": (1, 3), "contract_b": (1, 3)}),
        ((8, 10, 6), (9, 5, 10, 7), {"contract_a": (1,), "contract_b": (2,)}),
        (
            (2, 30, 3, 16),
            (2, 20, 3, 16),
            {"contract_a": (3,), "contract_b": (3,), "batch_a": (0, 2), "batch_b": (0, 2)},
        ),
        (
            (2, 3, 30, 20),
            (2, 20, 3, 16),
            {"contract_a": (3,), "contract_b": (1,), "batch_a": (0, 1), "batch_b": (0, 2)},
        ),
        ((64,), (80,), {"contract_a": (), "contract_b": ()}),
        ((100,), (100, 80), {"contract_a": (0,), "contract_b": (0,)}),
    ]
    for left, right, how in cases:
        function = lambda a, b, how=how: dot(a, b, **how)  # noqa: E731
        after = function if threads == 1 else lambda a, b, f=function: maximum(f(a, b) * 2.0, 0.0)
        check(after, random(*left), random(*right), machine=machine)


# -- few rows -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("vector_bytes", [64, 16, 4])
@pytest.mark.parametrize("layout", ["NN", "NT"])
def test_few_rows(layout: str, vector_bytes: int) -> None:
    product = LAYOUTS[layout]
    for threads, (m, k, n) in zip((1, 2, 2), ((1, 19, 5000), (3, 70, 131), (7, 33, 68)), strict=True):
        machine = replace(BASE, threads=threads, vector_bytes=vector_bytes)
        check(lambda x, w: maximum(product(x, w) + 1.0, 0.0), *operands(layout, m, k, n), machine=machine)
    check(product, *operands(layout, 2, 40, 90, 5), machine=replace(BASE, threads=2, vector_bytes=vector_bytes))


@pytest.mark.parametrize("layout", ["NN", "TN"])
def test_small_results_of_long_sums(layout: str) -> None:
    """Read the right operand unchanged: there is no buffer of packed blocks."""
    for m, k, n in ((1, 1030, 5), (12, 1024, 12), (5, 1031, 33), (8, 2048, 8)):
        arrays = operands(layout, m, k, n)
        check(LAYOUTS[layout], *arrays)
        graph = graph_of(LAYOUTS[layout], {f"x{i}": a for i, a in enumerate(arrays)})
        assert compile_graph.compiled(graph, BASE, CompileTarget()).program.arena < 4096
    check(LAYOUTS[layout], *operands(layout, 64, 90, 10))  # packed, with a narrow rest


def test_few_rows_of_a_transposed_matrix() -> None:
    for layout in ("TN", "TT"):
        check(LAYOUTS[layout], *operands(layout, 4, 40, 90))


@pytest.mark.parametrize("threads", [1, 2])
def test_a_matrix_times_a_vector(threads: int) -> None:
    machine = replace(SMALL, threads=threads)
    check(matmul, random(50, 70), random(70), machine=machine)
    check(lambda x, w: maximum(matmul(x, w) + 1.0, 0.0), random(3, 50, 70), random(70, 1), machine=machine)
    check(lambda x, w: matmul(x, w) + 1.0, random(2, 50, 300), random(2, 300, 3), machine=machine)
    check(LAYOUTS["TN"], *operands("TN", 200, 70, 2), machine=machine)
    batched = {"contract_a": (2,), "contract_b": (1,), "batch_a": (0,), "batch_b": (0,)}
    check(lambda a, b: dot(a, b, **batched), random(5, 40, 30), random(5, 30), machine=machine)


# -- small results of long sums -----------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32])
@pytest.mark.parametrize(("m", "n"), [(1, 1), (2, 3), (12, 5)], ids=str)
def test_results_narrower_than_a_vector(m: int, n: int, dtype: Any) -> None:
    check(lambda x, w: maximum(matmul(x, w), 1), *operands("NN", m, 2045, n, dtype=dtype), rtol=1e-4)
    check(LAYOUTS["TT"], *operands("TT", m, 1100, n, dtype=dtype), rtol=1e-4)
    check(matmul, *operands("NN", m, 1100, n, 3, dtype=dtype), machine=replace(BASE, threads=2), rtol=1e-4)
    check(matmul, *operands("NN", m, 1100, n, dtype=dtype), machine=replace(BASE, vector_bytes=16), rtol=1e-4)


def test_short_rows_are_read_as_full_vectors() -> None:
    """Three columns are three vectors of sixteen rows; their sums are registers, not elements of an array."""
    graph = graph_of(matmul, {"x": random(2, 5000), "w": random(5000, 3)})
    (function,) = programs.write(graph, BASE).functions.values()
    text = tir.text(function.primfunc)
    assert text.count("T.Shuffle(") == 6
