"""Convolutions and pools of bytes with channels last: equal to integer NumPy on every set of instructions."""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any

import numpy as np
import pytest
from test_int8x4 import BF16, MACHINES, runs

import mithril as ml
from mithril import ops
from mithril.graph import Builder, Decisions, Graph, evaluate
from mithril.graph.dtypes import dtype as as_dtype
from mithril.ops import cast
from mithril_cbackend.compile_target import CompileTarget
from mithril_cbackend.graph import integer_products
from mithril_cbackend.graph.half_floats import in_float32
from mithril_cbackend.lowering.element import kernel_builder
from mithril_cbackend.lowering.element.kernel_builder import Machine
from mithril_cbackend.lowering.int8x4 import byte_operations
from mithril_cbackend.program import compile_graph, program as programs
from mithril_cbackend.program.c_module import module_text

RNG = np.random.default_rng(0)
Array = np.ndarray[Any, Any]

# image, weights, stride, padding, dilation, groups
CONVOLUTIONS = [
    ((2, 64, 9, 9), (40, 64, 3, 3), 1, 1, 1, 1),
    ((1, 24, 17, 20), (70, 24, 3, 3), 2, 1, 1, 1),
    ((1, 3, 37, 32), (32, 3, 7, 7), 2, 3, 1, 1),  # the first one of a network
    ((2, 64, 14, 14), (16, 64, 1, 1), 1, 0, 1, 1),  # read in place, with tiles across images
    ((1, 92, 7, 7), (40, 92, 1, 1), 1, 0, 1, 1),  # 23 int8x4 groups, no whole blocks
    ((1, 64, 13, 14), (70, 64, 1, 1), 2, 0, 1, 1),
    ((1, 130, 5, 40), (33, 130, 3, 3), 1, 1, 1, 1),
    ((1, 8, 70, 40), (16, 8, 3, 3), 1, 0, 1, 1),
    ((1, 64, 15, 15), (64, 64, 3, 3), 2, 1, 1, 1),  # tiles of two rows, of which the last is outside
    ((1, 32, 20, 20), (32, 32, 3, 3), 1, 2, 2, 1),
    ((1, 48, 13, 13), (48, 1, 3, 3), 1, 1, 1, 48),  # one channel per group
    ((2, 64, 13, 13), (96, 16, 3, 3), 2, 1, 1, 4),
    ((1, 40, 9, 9), (40, 4, 5, 5), 1, 2, 1, 10),
    ((1, 64, 9, 9), (64, 32, 3, 3), 1, 1, 1, 2),  # groups of whole packed blocks
    ((1, 64, 6, 5), (16, 64, 1, 1), 2, 1, 1, 1),  # one pixel of the kernel, with padding
    ((2, 24, 6, 14), (40, 24, 3, 3), 1, 1, 1, 1),  # tiles that end with their row
]
PAIRS_LEFT = 3  # convolutions with groups that share a packed block, which bfloat16 leaves to float32


def integer_program(case: Any, zero: int) -> tuple[Any, Array, Array, dict[str, Any]]:
    """Return a function that builds a convolution of quantized values, its inputs, and attributes."""
    image, weights, stride, padding, dilation, groups = case
    x, w = RNG.integers(0, 256, image, np.uint8), RNG.integers(-128, 128, weights, np.int8)
    a: dict[str, Any] = {"stride": (stride, stride), "dilation": (dilation, dilation), "groups": groups}
    pads = ((padding, padding),) * 2

    def build(quantized: Any, kernels: Any) -> Any:
        if zero:
            quantized = ops.pad(quantized, widths=((0, 0), (0, 0), *pads), value=zero)
        return ops.conv(
            cast(quantized, dtype="int32"), cast(kernels, dtype="int32"), padding=no(pads) if zero else pads, **a
        )

    return build, x, w, a | {"padding": pads}


def no(pads: Any) -> Any:
    return tuple((0, 0) for _ in pads)


@pytest.mark.parametrize("name", MACHINES)
def test_convolutions_equal_integers(name: str) -> None:
    """Compare all convolutions in one program, padded with 0 and with another zero point."""
    machine, zero = MACHINES[name], 7 if name in ("all", "32 bytes") else 0
    if not runs(machine):
        pytest.skip(f"this machine cannot run code for {machine.cpu}")
    cases = [integer_program(case, zero) for case in (CONVOLUTIONS if name == "all" else CONVOLUTIONS[1::2])]
    with Builder() as b:
        inputs = [b.input(f"x{k}", x.shape, "uint8") for k, (_, x, _, _) in enumerate(cases)]
        results = {
            f"y{k}": build(i, b.constant(w)) for k, (i, (build, _, w, _)) in enumerate(zip(inputs, cases, strict=True))
        }
    graph = integer_products.fused(b.build(results), machine)
    assert sum(node.op is byte_operations.conv_int8x4 for node in graph.nodes) == len(cases)
    sums = compile_graph.compiled(graph, machine, CompileTarget())(
        {}, {f"x{k}": x for k, (_, x, _, _) in enumerate(cases)}
    )
    for k, (_, x, w, a) in enumerate(cases):
        padded = np.pad(x.astype(np.float64), ((0, 0), (0, 0), *a["padding"]), constant_values=zero)
        exact = ops.conv(padded, w.astype(np.float64), **{**a, "padding": no(a["padding"])}).astype(np.int32)
        np.testing.assert_array_equal(sums[f"y{k}"], exact, err_msg=f"case {k} on {name}")


@pytest.mark.parametrize(
    "case",
    [((1, 24, 3, 3), (40, 24, 3, 3), 1, 1, 2, 1), ((1, 128, 1, 1), (96, 128, 1, 1), 1, 0, 1, 1)],
    ids=["copied, dilated", "tiles of two threads"],
)
def test_results_of_one_pixel_are_scaled(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run an epilogue whose operands have as many elements as the result."""
    monkeypatch.setattr(kernel_builder, "PARALLEL_WORK", 1)
    build, x, w, _ = integer_program(case, 0)
    scale = RNG.uniform(0.5, 1, (len(w), 1, 1)).astype(np.float32)
    with Builder() as b:
        sums = build(b.input("x", x.shape, "uint8"), b.constant(w))
        result = ops.maximum(cast(sums, dtype="float32") * b.constant(scale), 0.0)
    graph, machine = b.build({"y": result}), MACHINES["two threads"]
    fused = integer_products.fused(graph, machine)
    assert byte_operations.conv_int8x4 in [node.op for node in fused.nodes]
    scaled = compile_graph.compiled(fused, machine, CompileTarget())({}, {"x": x})["y"]
    np.testing.assert_array_equal(scaled, evaluate(graph, {"x": x})["y"])


@pytest.mark.parametrize(("width", "rows"), [(7, 7), (14, 7), (9, 8), (56, 8)])
def test_tiles_cross_the_ends_of_rows_where_it_takes_less_time(width: int, rows: int) -> None:
    """Two pixels of padding separate two rows of an image; their results are not used."""
    build, _, w, _ = integer_program(((1, 16, width, width), (32, 16, 3, 3), 1, 1, 1, 1), 0)
    with Builder() as b:
        result = build(b.input("x", (1, 16, width, width), "uint8"), b.constant(w))
    machine = Machine("x86-64-v4", 1, features=("avx512bw", "avx512vnni"))
    source = module_text(programs.write(integer_products.fused(b.build({"y": result}), machine), machine), 16)
    assert f"int32_t dot_u8s8_{rows}x32(" in source


@pytest.mark.parametrize("name", ["all", "no tiles"])
def test_convolutions_of_bfloat16_have_float32_sums(name: str) -> None:
    """Numbers of eight bits have exact products and sums, whatever the order."""
    machine = MACHINES[name]
    if not any(f in machine.features for f in ("amx-bf16", "avx512bf16")):
        pytest.skip("this machine does not multiply bfloat16")
    cases = [integer_program(case, 0) for case in CONVOLUTIONS]
    images = [(x % 16).astype(BF16) for _, x, _, _ in cases]
    with Builder() as b:
        results = {}
        for k, (image, (_, _, w, a)) in enumerate(zip(images, cases, strict=True)):
            x, kernels = b.input(f"x{k}", image.shape, "bfloat16"), b.constant((w // 8).astype(BF16))
            results[f"y{k}"] = ops.conv(x, kernels, **a)
    graph = integer_products.fused(b.build(results), machine)
    assert sum(node.op is byte_operations.conv_int8x4 for node in graph.nodes) == len(cases) - PAIRS_LEFT
    sums = compile_graph.compiled(graph, machine, CompileTarget())({}, {f"x{k}": x for k, x in enumerate(images)})
    for k, (image, (_, _, w, a)) in enumerate(zip(images, cases, strict=True)):
        exact = ops.conv(image.astype(np.float64), (w // 8).astype(np.float64), **a).astype(BF16)
        np.testing.assert_array_equal(sums[f"y{k}"], exact, err_msg=f"case {k} on {name}")


def bfloat16_sums(name: str, x: Array, w: Array, pad: float | None = None, **a: Any) -> tuple[Array, Array, list[str]]:
    """Return the results of a convolution of bfloat16, the exact ones, and its operations."""
    machine = MACHINES[name]
    if not any(f in machine.features for f in ("amx-bf16", "avx512bf16")):
        pytest.skip("this machine does not multiply bfloat16")
    widths, zeros = ((0, 0), (0, 0), (1, 1), (1, 1)), ((0, 0), (0, 0))
    x, w = x.astype(BF16), w.astype(BF16)
    with Builder() as b:
        pixels = b.input("x", x.shape, "bfloat16")
        padded = pixels if pad is None else ops.pad(pixels, widths=widths, value=pad)
        graph = b.build({"y": ops.conv(padded, b.constant(w), **{"padding": zeros, **a})})
    graph = integer_products.fused(graph, machine)
    result = compile_graph.compiled(graph, machine, CompileTarget())({}, {"x": x})["y"]
    image = x.astype(np.float32) if pad is None else np.pad(x.astype(np.float32), widths, constant_values=pad)
    exact = ops.conv(image, w.astype(np.float32), **{"padding": zeros, **a}).astype(BF16)
    return result.astype(np.float32), exact.astype(np.float32), [node.op.name for node in graph.nodes]


@pytest.mark.parametrize("pad", [0.0, 0.5, 1.0, -np.inf, np.nan])
def test_pads_of_bfloat16_have_their_value(pad: float) -> None:
    x, w = RNG.integers(1, 8, (1, 32, 6, 7)), RNG.integers(1, 8, (32, 32, 3, 3))
    result, exact, names = bfloat16_sums("all", x, w, pad)
    np.testing.assert_array_equal(result, exact)
    assert ("pad" in names) == (pad != 0)


SPECIAL = [  # channels of the image, weights, groups: runs that are whole AMX blocks, and others
    (64, (32, 64, 3, 3), 1),
    (48, (32, 48, 3, 3), 1),
    (144, (32, 144, 1, 1), 1),
    (92, (32, 92, 1, 1), 1),
    (3, (48, 3, 7, 7), 1),
    (32, (64, 1, 3, 3), 32),
    (64, (64, 32, 3, 3), 2),
    (96, (48, 32, 1, 1), 3),
    (66, (64, 33, 1, 1), 2),
]


@pytest.mark.parametrize("name", ["all", "no tiles"])
@pytest.mark.parametrize("case", SPECIAL, ids=str)
def test_numbers_that_are_not_finite_reach_their_own_windows(case: Any, name: str) -> None:
    """Multiply a pixel that is inf or nan by no weight of another window or group, not even by 0."""
    channels, shape, groups = case
    x, w = RNG.integers(1, 8, (1, channels, 14, 15)), RNG.integers(1, 8, shape)
    x = x.astype(np.float32)
    x[0, 0, 7, 7], x[0, 0, 1, 9], x[0, -1, 11, 13] = np.inf, np.nan, -np.inf
    result, exact, _ = bfloat16_sums(name, x, w, groups=groups)
    np.testing.assert_array_equal(result, exact)
    assert np.isfinite(exact).any()


@pytest.mark.parametrize("case", SPECIAL, ids=str)
def test_tiles_of_bfloat16_read_no_int8x4_after_a_copy(case: Any) -> None:
    """Copies of images are in scratch, which a larger image filled with nan before."""
    machine, (channels, shape, groups) = MACHINES["all"], case
    if not any(f in machine.features for f in ("amx-bf16", "avx512bf16")):
        pytest.skip("this machine does not multiply bfloat16")
    sizes, weights = {"large": 13, "small": 9}, RNG.integers(1, 8, shape).astype(BF16)
    with Builder() as b:
        images = {name: b.input(name, (1, channels, n, n), "bfloat16") for name, n in sizes.items()}
        graph = b.build({name: ops.conv(x, b.constant(weights), groups=groups) for name, x in images.items()})
    graph = integer_products.fused(graph, machine)
    small = RNG.integers(1, 8, (1, channels, 9, 9)).astype(BF16)
    inputs = {"large": np.full((1, channels, 13, 13), np.nan, BF16), "small": small}
    results = compile_graph.compiled(graph, machine, CompileTarget())({}, inputs)
    exact = ops.conv(small.astype(np.float32), weights.astype(np.float32), groups=groups).astype(BF16)
    np.testing.assert_array_equal(results["small"].astype(np.float32), exact.astype(np.float32))


def test_copies_have_no_rows_of_padding_that_no_window_reads() -> None:
    """Pad an image by more rows than its only window has, and read another input of the program afterwards."""
    x, w = RNG.integers(0, 256, (1, 64, 6, 600), np.uint8), RNG.integers(-128, 128, (32, 64, 1, 1), np.int8)
    a: dict[str, Any] = {"stride": (999, 1), "padding": ((90, 0), (0, 0))}
    with Builder() as b:
        image, other = b.input("x", x.shape, "uint8"), b.input("other", (64, 64), "float32")
        square = ops.barrier(ops.matmul(other, other))[0]
        sums = ops.conv(cast(image, dtype="int32"), cast(b.constant(w), dtype="int32"), **a)
        graph = b.build({"y": sums, "square": ops.matmul(square, other)})
    numbers = {"x": x, "other": RNG.integers(-2, 3, (64, 64)).astype(np.float32)}
    graph = integer_products.fused(graph, MACHINES["all"])
    results = compile_graph.compiled(graph, MACHINES["all"], CompileTarget())({}, numbers)
    assert not results["y"].any()
    np.testing.assert_array_equal(results["square"], np.linalg.matrix_power(numbers["other"], 3))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a child process reads after the end of an image")
@pytest.mark.parametrize("groups", [1, 3])
def test_images_are_read_up_to_their_end(groups: int) -> None:
    """Read an image in place that ends at the end of its page, before one that must not be read."""
    image, weights = (1, 16, 16, 96), (1, 1, 96 // groups, 48)
    with Builder() as b:
        x, w = b.input("x", image, "uint8"), b.constant(RNG.integers(-9, 9, weights, np.int8))
        a: dict[str, Any] = {"stride": (1, 1), "dilation": (1, 1), "padding": ((0, 0), (0, 0)), "zero": 0}
        graph = b.build({"y": byte_operations.conv_int8x4(x, w, groups=groups, **a)})
    executable = compile_graph.compiled(graph, MACHINES["all"], CompileTarget())
    size = int(np.prod(image))
    pages = -(-size // mmap.PAGESIZE)
    memory = mmap.mmap(-1, (pages + 1) * mmap.PAGESIZE)
    elements = np.frombuffer(memory, np.uint8, size, pages * mmap.PAGESIZE - size).reshape(image)
    expected = executable({}, {"x": elements})["y"]
    child = os.fork()
    if child == 0:
        guard = elements.ctypes.data + size
        status = ctypes.CDLL(None).mprotect(ctypes.c_void_p(guard), mmap.PAGESIZE, 0)
        result = executable({}, {"x": elements})["y"]
        os._exit(0 if status == 0 and np.array_equal(result, expected) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_convolutions_of_bfloat16_without_instructions_are_float32() -> None:
    _, x, w, a = integer_program(CONVOLUTIONS[1], 0)
    with Builder() as b:
        y = ops.conv(b.input("x", x.shape, "bfloat16"), b.constant(w.astype(BF16)), **a)
    graph = integer_products.fused(b.build({"y": y}), MACHINES["plain"])
    assert [n.result.dtype.name for n in graph.nodes if n.op is ops.conv] == ["float32"]


OPEN = [  # open sizes: the batch alone, or the image, too
    ((64, 7, 7), (40, 64, 1, 1), 1, 0, 1, 1),  # in place
    ((32, 2, 3), (33, 32, 1, 1), 1, 0, 1, 1),  # fewer pixels than a tile has
    ((16, 9, 11), (40, 16, 3, 3), 2, 1, 1, 1),
    ((32, 9, 9), (32, 1, 3, 3), 1, 1, 1, 32),
    ((64, None, None), (40, 64, 1, 1), 1, 0, 1, 1),
    ((64, None, None), (40, 64, 1, 1), 2, 0, 1, 1),
    ((64, None, 9), (16, 64, 1, 1), 3, 1, 1, 1),
    ((16, None, None), (40, 16, 3, 3), 1, 1, 1, 1),
    ((3, None, None), (33, 3, 7, 7), 2, 3, 1, 1),
    ((48, 9, None), (48, 1, 3, 3), 1, 1, 1, 48),
    ((64, None, 10), (96, 16, 3, 3), 2, 2, 2, 4),
]
SIZES = [(1, 7, 8), (2, 15, 18), (3, 5, 41), (8, 6, 6), (5, 33, 31), (33, 5, 6), (0, 7, 7)]  # batch, height, width


@pytest.mark.parametrize("name", ["all", "no tiles", "16 bytes", "no vectors", "two threads"])
def test_convolutions_of_open_sizes_equal_integers(name: str) -> None:
    """Run one program on images of several sizes, with tiles of which the last ones are not full."""
    machine = MACHINES[name]
    if not runs(machine):
        pytest.skip(f"this machine cannot run code for {machine.cpu}")
    sizes = [ml.Dim("n"), ml.Dim("h", 5), ml.Dim("w", 5)]
    with Builder() as b:
        cases: list[Any] = []
        results = {}
        for k, (image, weights, *a) in enumerate(OPEN):
            build, _, w, attributes = integer_program(((1, *[n or 9 for n in image]), weights, *a), 7)
            shape = (sizes[0], image[0], *[d if n is None else n for n, d in zip(image[1:], sizes[1:], strict=True)])
            results[f"y{k}"] = build(b.input(f"x{k}", shape, "uint8"), b.constant(w))
            cases.append((image, w, attributes))
    graph = integer_products.fused(b.build(results), machine)
    assert sum(node.op is byte_operations.conv_int8x4 for node in graph.nodes) == len(cases)
    executable = compile_graph.compiled(graph, machine, CompileTarget())
    for batch, *image in SIZES:
        shapes = [(batch, c[0][0], *[n or m for n, m in zip(c[0][1:], image, strict=True)]) for c in cases]
        inputs = {f"x{k}": RNG.integers(0, 256, shape, np.uint8) for k, shape in enumerate(shapes)}
        sums = executable({}, inputs)
        for k, (_, w, a) in enumerate(cases):
            padded = np.pad(inputs[f"x{k}"].astype(np.float64), ((0, 0), (0, 0), *a["padding"]), constant_values=7)
            exact = ops.conv(padded, w.astype(np.float64), **{**a, "padding": no(a["padding"])}).astype(np.int32)
            np.testing.assert_array_equal(sums[f"y{k}"], exact, err_msg=f"case {k} of {batch} {image} on {name}")


def test_convolutions_of_bfloat16_run_open_sizes() -> None:
    machine = MACHINES["all"]
    if not any(f in machine.features for f in ("amx-bf16", "avx512bf16")):
        pytest.skip("this machine does not multiply bfloat16")
    sizes = (ml.Dim("n"), ml.Dim("h", 5), ml.Dim("w", 5))
    programs = [integer_program(((1, w[1] * a[-1], 9, 9), w, *a), 0) for _, w, *a in OPEN]
    with Builder() as b:
        results = {}
        for k, (_, x, w, a) in enumerate(programs):
            image = b.input(f"x{k}", (sizes[0], x.shape[1], *sizes[1:]), "bfloat16")
            results[f"y{k}"] = ops.conv(image, b.constant((w // 8).astype(BF16)), **a)
    graph = integer_products.fused(b.build(results), machine)
    assert sum(node.op is byte_operations.conv_int8x4 for node in graph.nodes) == len(OPEN) - PAIRS_LEFT
    executable = compile_graph.compiled(graph, machine, CompileTarget())
    for batch, *image in SIZES[::2]:
        shapes = [(batch, x.shape[1], *image) for _, x, _, _ in programs]
        inputs = {f"x{k}": RNG.integers(0, 16, shape).astype(BF16) for k, shape in enumerate(shapes)}
        sums = executable({}, inputs)
        for k, (_, _, w, a) in enumerate(programs):
            exact = ops.conv(inputs[f"x{k}"].astype(np.float64), (w // 8).astype(np.float64), **a).astype(BF16)
            np.testing.assert_array_equal(sums[f"y{k}"], exact, err_msg=f"case {k} of {batch} {image}")


POOLS = [((3, 3), (2, 2), ((1, 1), (1, 1))), ((2, 2), (2, 2), ((0, 0), (0, 0))), ((7, 6), (1, 1), ((0, 0), (0, 0)))]


@pytest.mark.parametrize("name", ["all", "16 bytes", "two threads"])
def test_pools_equal_integers(name: str) -> None:
    machine = MACHINES[name]
    if not runs(machine):
        pytest.skip(f"this machine cannot run code for {machine.cpu}")
    x, expected = RNG.integers(0, 256, (2, 7, 6, 91), np.uint8), {}
    with Builder() as b:
        image = b.input("x", x.shape, "uint8")
        results = {}
        for k, (kernel, stride, padding) in enumerate(POOLS):
            a: dict[str, Any] = {"kernel": kernel, "stride": stride, "padding": padding}
            results[f"max{k}"] = byte_operations.max_pool_last(image, **a)
            results[f"sum{k}"] = byte_operations.sum_pool_bytes(image, zero=9, **a)
            for kind, value in (("max", 0), ("sum", 9)):
                padded = np.pad(x, ((0, 0), *padding, (0, 0)), constant_values=value).astype(np.int64)
                view = np.lib.stride_tricks.sliding_window_view(padded, kernel, axis=(1, 2))
                expected[f"{kind}{k}"] = getattr(view[:, :: stride[0], :: stride[1]], kind)(axis=(-2, -1))
    sums = compile_graph.compiled(b.build(results), machine, CompileTarget())({}, {"x": x})
    for key, exact in expected.items():
        np.testing.assert_array_equal(sums[key], exact, err_msg=key)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_maxima_of_floats_with_channels_last(dtype: str) -> None:
    """Numbers below 0 win against padding; nan wins everywhere."""
    x = -RNG.uniform(1, 2, (2, 7, 6, 37)).astype(as_dtype(dtype).numpy)
    x[0, 3, 3, 5] = np.nan
    a: dict[str, Any] = {"kernel": (3, 3), "stride": (2, 2), "padding": ((1, 1), (1, 1))}
    with Builder() as b:
        graph = b.build({"y": byte_operations.max_pool_last(b.input("x", x.shape, dtype), **a)})
    result = compile_graph.compiled(graph, MACHINES["all"], CompileTarget())({}, {"x": x})["y"]
    exact = np.moveaxis(ops.max_pool(np.moveaxis(x, -1, 1).astype(np.float32), dilation=(1, 1), **a), 1, -1)
    np.testing.assert_array_equal(result.astype(np.float32), exact)
    assert np.isnan(exact).any()


def test_windows_of_padding_are_lower_than_all_quantized_values() -> None:
    """Pool an image of one row, which lies between the elements of windows."""
    x = RNG.integers(1, 9, (1, 4, 1, 8), np.uint8)
    a: dict[str, Any] = {"kernel": (2, 2), "stride": (1, 1), "padding": ((2, 2), (0, 0)), "dilation": (3, 1)}
    with Builder() as b:
        y = ops.max_pool(ops.dequantize(b.input("x", x.shape, "uint8"), np.float32(0.5), np.int32(3)), **a)
        graph = b.build({"y": y})
    exact = evaluate(graph, {"x": x})["y"]
    np.testing.assert_array_equal(ml.compile(graph, "c")({"x": x})["y"], exact)
    assert np.isinf(exact).any()


@pytest.mark.parametrize("dtype", ["int8", "int32", "uint8", "float32", "bfloat16"])
def test_maxima_of_any_numbers_equal_their_reference(dtype: str) -> None:
    x = RNG.integers(0, 100, (1, 5, 6, 8)).astype(as_dtype(dtype).numpy)
    a: dict[str, Any] = {"kernel": (3, 3), "stride": (2, 2), "padding": ((1, 1), (1, 1))}
    with Builder() as b:
        graph = b.build({"y": byte_operations.max_pool_last(b.input("x", x.shape, dtype), **a)})
    result = compile_graph.compiled(graph, MACHINES["all"], CompileTarget())({}, {"x": x})["y"]
    expected = np.moveaxis(ops.max_pool(np.moveaxis(x, -1, 1), dilation=(1, 1), **a), 1, -1)
    for y in (result, evaluate(graph, {"x": x})["y"]):
        assert y.dtype == x.dtype
        np.testing.assert_array_equal(y.astype(np.float32), expected.astype(np.float32))


def test_int8x4_of_pixels_and_rounding() -> None:
    x = RNG.integers(0, 256, (2, 6, 5, 37), np.uint8)
    numbers = RNG.standard_normal((3, 50)).astype(np.float32) * 100
    numbers[0, :4] = np.nan, np.inf, -np.inf, 0.0
    with Builder() as b:
        int8x4s = byte_operations.int8x4_of_pixels(b.input("x", x.shape, "uint8"), per=4)
        quantized = byte_operations.quantize_bytes(b.input("v", numbers.shape, "float32"), scale=0.37, zero=100)
    results = compile_graph.compiled(b.build({"w": int8x4s, "q": quantized}), MACHINES["all"], CompileTarget())(
        {}, {"x": x, "v": numbers}
    )
    pixels = results["w"].view(np.uint8)
    np.testing.assert_array_equal(pixels[..., :6], x.transpose(0, 2, 3, 1))
    assert not pixels[..., 6:].any()
    exact = np.clip(np.rint(np.nan_to_num(numbers, nan=-1e9, posinf=1e9, neginf=-1e9) / np.float32(0.37)) + 100, 0, 255)
    assert np.abs(results["q"] - exact).max() <= 1
    assert (results["q"] == exact).mean() > 0.98  # ties
    assert results["q"][0, :4].tolist() == [0, 255, 0, 100]


def weights(b: Builder, *shape: int) -> Any:
    quantized = b.constant(RNG.integers(-127, 128, shape, np.int8), name="w")
    steps = RNG.uniform(0.002, 0.004, shape[0]) * (9 * 48 / np.prod(shape[1:])) ** 0.5
    return ops.dequantize(quantized, b.constant(steps.astype(np.float32), name="steps"), axis=0)


def conv(x: Any, w: Any, stride: int = 1, groups: int = 1) -> Any:
    pads = ((w.shape[2] // 2,) * 2,) * 2
    y = ops.conv(x, w, stride=(stride, stride), padding=pads, dilation=(1, 1), groups=groups)
    return y + RNG.standard_normal((1, w.shape[0], 1, 1)).astype(np.float32)


def rounded(zero: int) -> Any:
    """Return a function that rounds a value to bytes with one scale."""

    def bytes_of(x: Any) -> Any:
        s, z = np.float32(0.05), np.int32(zero)
        return ops.dequantize(ops.quantize(x, s, z, dtype="uint8"), s, z)

    return bytes_of


def shuffling(zero: int) -> Graph:
    """Return a unit of ShuffleNet: selected channels, a concatenation, a shuffle."""
    bytes_of = rounded(zero)
    with Builder() as b:
        x = bytes_of(b.input("x", (1, 32, 13, 13), "float32"))
        x = bytes_of(ops.relu(conv(x, weights(b, 64, 32, 3, 3))))
        x = bytes_of(ops.relu(conv(x, weights(b, 64, 64, 1, 1))))
        left, right = (bytes_of(ops.slice(x, starts=(k,), stops=(k + 32,), steps=(1,), axes=(1,))) for k in (0, 32))
        right = bytes_of(ops.relu(conv(right, weights(b, 32, 32, 3, 3))))
        concatenation = bytes_of(ops.concat(left, right, axis=1))
        groups = ops.transpose(ops.reshape(concatenation, shape=(1, 2, 32, 13, 13)), perm=(0, 2, 1, 3, 4))
        x = bytes_of(ops.reshape(groups, shape=(1, 64, 13, 13)))
        y = bytes_of(conv(x, weights(b, 48, 64, 1, 1)))
        return b.build({"y": ops.mean(y, axis=(2, 3)), "pooled": y})


@pytest.mark.parametrize("zero", [0, 120])
def test_joined_and_shuffled_channels_stay_bytes(zero: int) -> None:
    graph = shuffling(zero)
    inputs = {"x": RNG.standard_normal((1, 32, 13, 13)).astype(np.float32)}
    reference, compiled = evaluate(graph, inputs), ml.compile(graph, "c")
    results = compiled(inputs)
    assert np.abs(results["pooled"] - reference["pooled"]).max() <= 0.151
    assert np.abs(results["pooled"] - reference["pooled"]).mean() < 0.02
    kernels = compiled.programs[-1].executable.program.kernels.values()
    inner = [k for k in kernels if k.outputs[0].shape not in (graph.outputs[1].shape, (1, 32, 13, 13))]
    stored = {v.dtype.name for k in inner for v in k.outputs if v.ndim == 4 and v.shape[1:3] != (1, 1)}
    assert stored <= {"uint8", "uint32"}
    transposes = [n for k in inner for n in k.nodes if n.op is ops.transpose and n.result.ndim == 4]
    assert not transposes


def network(zero: int, *sizes: Any) -> Graph:
    """Return convolutions with pools, a residual addition, groups and an average between them."""
    bytes_of = rounded(zero)
    n, height, width = sizes or (1, 33, 33)
    with Builder() as b:
        x = bytes_of(b.input("x", (n, 3, height, width), "float32"))
        x = bytes_of(ops.relu(conv(x, weights(b, 48, 3, 5, 5), 2)))  # rounded again behind the pool
        x = bytes_of(ops.max_pool(x, kernel=(3, 3), stride=(2, 2), padding=((1, 1), (1, 1)), dilation=(1, 1)))
        y = bytes_of(ops.relu(conv(x, weights(b, 48, 1, 3, 3), groups=48)))
        x = bytes_of(ops.relu(conv(y, weights(b, 48, 48, 1, 1)) + x))
        y = ops.avg_pool(x, kernel=(3, 3), stride=(2, 2), padding=((1, 1), (1, 1)), count_include_pad=False)
        pooled = bytes_of(y)
        y = ops.mean(bytes_of(conv(pooled, weights(b, 40, 48, 3, 3))), axis=(2, 3))
    return b.build({"y": y, "pooled": pooled})


@pytest.mark.parametrize("zero", [0, 120])
def test_networks_store_bytes_only(zero: int) -> None:
    graph = network(zero)
    inputs = {"x": RNG.standard_normal((1, 3, 33, 33)).astype(np.float32)}
    reference, compiled = evaluate(graph, inputs), ml.compile(graph, "c")
    results = compiled(inputs)
    for name, array in reference.items():
        assert np.abs(results[name] - array).max() <= 0.051, name
        assert np.abs(results[name] - array).mean() < 0.01, name  # a fifth of a step: rounded ties
    kernels = compiled.programs[-1].executable.program.kernels.values()
    inner = [k for k in kernels if k.outputs[0].shape != graph.outputs[1].shape]  # all but the one of the result
    stored = {v.dtype.name for k in inner for v in k.outputs if v.ndim == 4 and v.shape[1:3] != (1, 1)}
    assert stored <= {"uint8", "uint32"}
    assert not any(node.op is ops.transpose for k in inner for node in k.nodes)
    roundings = [node for k in kernels for node in k.nodes if node.op is byte_operations.quantize_bytes]
    assert len(roundings) == 6, "one for the image, and one for each of five results"


@pytest.mark.parametrize("sizes", [(ml.Dim("n"), 33, 33), (ml.Dim("n"), ml.Dim("h", 9), ml.Dim("w", 9))], ids=str)
def test_networks_of_open_sizes_are_one_program(sizes: Any) -> None:
    RNG.bit_generator.state = np.random.default_rng(5).bit_generator.state  # the same weights as those of ``exact``
    compiled = ml.compile(network(120, *sizes), "c")
    for shape in ((1, 33, 33), (3, 33, 33)) if sizes[1] == 33 else ((3, 33, 33), (2, 20, 35)):
        RNG.bit_generator.state = np.random.default_rng(5).bit_generator.state
        exact = ml.compile(network(120, *shape), "c")
        x = {"x": RNG.standard_normal((shape[0], 3, *shape[1:])).astype(np.float32)}
        results, expected = compiled(x), exact(x)
        np.testing.assert_array_equal(results["pooled"], expected["pooled"], err_msg=str(shape))
        np.testing.assert_allclose(results["y"], expected["y"], rtol=1e-5, atol=1e-5, err_msg=str(shape))
    assert len(compiled.programs) == 1
    assert not [d for d in compiled.decisions if "one program for each size" in d.message]


COOPER_LAKE = Machine("cooperlake", 1, features=("avx512bf16", "avx512bw", "avx512vnni"))


@pytest.mark.parametrize(
    ("kind", "machine", "product"),
    [
        ("bfloat16", COOPER_LAKE, "bfloat16"),
        ("bfloat16", MACHINES["plain"], "float32"),
        ("float16", COOPER_LAKE, "float32"),
    ],
)
def test_what_follows_a_convolution_of_16_bit_floats_is_float32(kind: str, machine: Machine, product: str) -> None:
    """Check the dtypes of a convolution with weights that are arguments, its epilogue and a product behind it."""
    with Builder() as b:
        image, w = b.input("x", (2, 3, 8, 8), kind), b.param("w", (4, 3, 3, 3), kind)
        y = ops.relu(ops.conv(image, w, stride=(1, 1), padding=((1, 1), (1, 1))))
        y = ops.matmul(ops.mean(y, axis=(2, 3)), b.param("v", (4, 5), kind))
        graph = b.build({"y": ops.exp(y)})
    decisions = Decisions()
    rewritten = in_float32(graph, machine, decisions)
    dtypes = {n.op.name: n.result.dtype.name for n in rewritten.nodes}
    assert {dtypes[name] for name in ("conv", "relu", "mean")} == {"float32"}
    assert dtypes["matmul"] == product
    assert str(decisions) == (
        "choice: float32 computes faster than 16-bit floats here; inputs, weights and results have 16 bits"
    )
