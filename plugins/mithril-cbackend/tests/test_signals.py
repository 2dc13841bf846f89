"""Convolutions of one spatial axis as int8x4 groups: equal to the reference, for every operation that follows them."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest
from test_int8x4 import BF16, MACHINES, away_from_halves, runs

import mithril as ml
from mithril import ops
from mithril.graph import Builder, evaluate
from mithril_cbackend.graph import integer_products
from mithril_cbackend.lowering.int8x4 import byte_operations

RNG = np.random.default_rng(0)

# weights, stride, padding, dilation, groups, zero point of the signal
CONVOLUTIONS = [
    ((48, 32, 3), 1, (1, 1), 1, 1, 0),
    ((40, 32, 7), 2, (3, 2), 1, 1, 117),
    ((64, 32, 1), 1, (0, 0), 1, 1, 3),
    ((32, 32, 3), 1, (4, 0), 2, 1, 0),  # causal
    ((32, 1, 5), 1, (2, 2), 1, 32, 0),  # one channel per group
]


def rounded(x: Any, b: Builder, scale: float, zero: int = 0) -> Any:
    s, z = b.constant(scale, "float32"), b.constant(zero, "int32")
    return ops.dequantize(ops.quantize(x, s, z, dtype="uint8"), s, z)


def kernel(b: Builder, shape: tuple[int, ...]) -> Any:
    quantized = b.constant(RNG.integers(-127, 128, shape, np.int8))
    return ops.dequantize(quantized, b.constant(RNG.uniform(0.001, 0.002, shape[0]).astype(np.float32)), axis=0)


def settings(stride: int, padding: tuple[int, int], dilation: int, groups: int) -> dict[str, Any]:
    return {"stride": (stride,), "padding": (padding,), "dilation": (dilation,), "groups": groups}


def test_convolutions_multiply_bytes() -> None:
    with Builder() as b:
        x, results = b.input("x", (2, 32, 77), "float32"), {}
        for k, (shape, stride, padding, dilation, groups, zero) in enumerate(CONVOLUTIONS):
            y = ops.conv(rounded(x, b, 0.02, zero), kernel(b, shape), **settings(stride, padding, dilation, groups))
            bias = b.constant(np.linspace(-1, 1, shape[0], dtype=np.float32).reshape(1, -1, 1))
            results[f"y{k}"] = ops.relu(y + bias)
    graph, inputs = b.build(results), {"x": away_from_halves((2, 32, 77), 0.02)}
    reference, compiled = evaluate(graph, inputs), ml.compile(graph, "c")
    calculated = compiled(inputs)
    assert compiled.source.count("= c.conv_int8x4(") == len(CONVOLUTIONS)
    for name, expected in reference.items():
        np.testing.assert_allclose(calculated[name], expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("shape", [(2, 32, 80), (ml.Dim("n"), 32, ml.Dim("w", 5))], ids=str)
def test_operations_between_convolutions_keep_bytes(shape: Any) -> None:
    """Pools, averages, joins, slices and residual additions, with one constant per place of the signal."""
    unit = settings(1, (1, 1), 1, 1)
    window: dict[str, Any] = {"kernel": (3,), "stride": (2,), "padding": ((1, 1),)}
    with Builder() as b:
        x = b.input("x", shape, "float32")
        first = rounded(x, b, 0.02, 100)
        y = rounded(ops.relu(ops.conv(first, kernel(b, (32, 32, 3)), **unit)), b, 0.05)
        z = rounded(ops.conv(y, kernel(b, (32, 32, 3)), **unit) + y, b, 0.05, 20)
        pooled = rounded(ops.max_pool(z, dilation=(1,), **window), b, 0.05, 20)
        means = rounded(ops.avg_pool(z, count_include_pad=False, **window), b, 0.05, 20)
        channels = ops.concat(pooled, means, axis=1)
        part = ops.slice(channels, starts=(16,), stops=(48,), axes=(1,), steps=(1,))
        if shape[2] == 80:
            part = ops.slice(part, starts=(1,), stops=(9,), axes=(2,), steps=(1,))
        last = ops.conv(rounded(part, b, 0.05, 20), kernel(b, (24, 32, 1)), **settings(1, (0, 0), 1, 1))
        last = last * b.constant(np.linspace(1, 2, 8, dtype=np.float32)) if shape[2] == 80 else last
        results = {"last": last, "mean": ops.mean(last, axis=2), "kept": ops.mean(last, axis=(2,), keepdims=True)}
    graph = b.build(results)
    inputs = {"x": away_from_halves((2, 32, 80), 0.02)}
    reference, compiled = evaluate(graph, inputs), ml.compile(graph, "c")
    calculated = compiled(inputs)
    assert compiled.source.count("= c.conv_int8x4(") == 3
    assert "= conv(" not in compiled.source
    assert all(f"= c.{name}(" in compiled.source for name in ("max_pool_last", "sum_pool_bytes"))
    for name, expected in reference.items():
        assert calculated[name].shape == expected.shape
        assert np.linalg.norm(calculated[name] - expected) < 0.01 * np.linalg.norm(expected)


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16"])
def test_reductions_behind_convolutions_keep_their_shape(dtype: str) -> None:
    """Reduce every subset of axes, with and without kept axes, and read it by an elementwise operation."""
    with Builder() as b:
        x = b.input("x", (2, 32, 24), "float32")
        if dtype == "uint8":
            y = ops.conv(rounded(x, b, 0.02, 7), kernel(b, (32, 32, 3)), **settings(1, (1, 1), 1, 1))
        else:
            w = b.constant(RNG.integers(-8, 8, (32, 32, 3)).astype(BF16))
            operands = [ops.cast(v, dtype="float32") for v in (ops.cast(x, dtype="bfloat16"), w)]
            y = ops.conv(*operands, **settings(1, (1, 1), 1, 1))
        results = {}
        for axis in [axes for n in range(1, 4) for axes in combinations(range(3), n)]:
            for keepdims in (False, True):
                for op in (ops.mean, ops.sum, ops.max, ops.min):
                    reduced = op(y, axis=axis, keepdims=keepdims)
                    name = f"{op.name}_{''.join(map(str, axis))}_{keepdims}"
                    results |= {name: reduced, f"{name}_read": ops.abs(reduced) + 1.0}
    inputs = {"x": away_from_halves((2, 32, 24), 0.02)}
    graph = b.build(results)
    reference, compiled = evaluate(graph, inputs), ml.compile(graph, "c")
    calculated = compiled(inputs)
    assert dtype == "bfloat16" or compiled.source.count("= c.conv_int8x4(") == 1
    for name, expected in reference.items():
        assert calculated[name].shape == expected.shape, name
        np.testing.assert_allclose(calculated[name], expected, atol=1e-4 * np.abs(expected).max(), err_msg=name)


def test_convolutions_multiply_bfloat16() -> None:
    machine = MACHINES["all"]
    if not runs(machine) or "avx512bf16" not in machine.features:
        pytest.skip("this machine does not multiply bfloat16")
    w = RNG.integers(-8, 8, (32, 32, 3)).astype(BF16)
    with Builder() as b:
        x = b.input("x", (1, 32, 100), "bfloat16")
        y = ops.conv(x, b.constant(w), **settings(1, (1, 1), 1, 1))
        y = ops.max_pool(y, kernel=(2,), stride=(2,), padding=((0, 0),), dilation=(1,))
    graph = b.build({"y": y})
    lowered = [n.op for n in integer_products.fused(graph, machine).nodes]
    assert byte_operations.conv_int8x4 in lowered
    assert byte_operations.max_pool_last in lowered
    inputs = {"x": RNG.integers(-8, 8, (1, 32, 100)).astype(BF16)}
    np.testing.assert_array_equal(ml.compile(graph, "c")(inputs)["y"], evaluate(graph, inputs)["y"])


def test_a_signal_is_joined_twice_with_another() -> None:
    with Builder() as b:
        x, z = b.input("x", (2, 32, 24), "float32"), b.input("z", (2, 32, 24), "float32")
        y = ops.conv(rounded(x, b, 0.02, 7), kernel(b, (32, 32, 3)), **settings(1, (1, 1), 1, 1))
        part = rounded(z, b, 0.02, 7)
        y = ops.concat(part, y, part, axis=1)
    graph, inputs = b.build({"y": y}), {n: away_from_halves((2, 32, 24), 0.02) for n in "xz"}
    expected, compiled = evaluate(graph, inputs)["y"], ml.compile(graph, "c")
    np.testing.assert_allclose(compiled(inputs)["y"], expected, atol=1e-5 * np.abs(expected).max())
    assert compiled.source.count("= c.conv_int8x4(") == 1


def test_signals_of_floats_stay_signals() -> None:
    with Builder() as b:
        y = ops.conv(b.input("x", (1, 32, 64), "float32"), kernel(b, (32, 32, 3)), **settings(1, (1, 1), 1, 1))
    lowered = integer_products.fused(b.build({"y": y}), MACHINES["all"])
    assert [n.result.ndim for n in lowered.nodes if n.op is ops.conv] == [3]
