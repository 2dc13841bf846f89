"""4-bit weights in groups: quantized values against a reference of NumPy, and models with them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import mithril as ml
from mithril import OptionError, ops
from mithril.models import Embedding, Linear, Relu
from mithril_passes.quantization.groups import CODEBOOKS, encode, table_of

RNG = np.random.default_rng(0)
X = RNG.standard_normal((8, 128)).astype(np.float32)
SHAPES = {"input": [8, 128]}
LOSS = {"int4": 0.09, "nf4": 0.09, "iq4_nl": 0.085, "mxfp4": 0.13}  # of normal weights in groups of 32


@pytest.fixture(scope="module")
def exact() -> Any:
    model = ml.Model()
    for k, (size, width) in enumerate(pairwise((128, 96, 64, 40))):
        if k:
            model += Relu()
        model += Linear(size, width, name=f"l{k}")
    result = ml.compile(model, "numpy", shapes=SHAPES, inference=True)
    result.bind(result.randomize_params(seed=0))
    return result


def quantized(exact: Any, **setting: Any) -> Any:
    result = ml.compile(exact.model, "numpy", shapes=SHAPES, static_inference=True, quantization=setting)
    result.bind(exact.params)
    return result


def error(a: Any, b: Any) -> float:
    return float(np.linalg.norm(np.asarray(a, np.float64) - b) / np.linalg.norm(b))


def reference(q: Any, table: Any, scale: Any, offset: Any = None) -> Any:
    """Compute numbers one by one."""
    rows, half = q.shape
    result = np.empty((rows, 2 * half), np.float32)
    group = 2 * half // scale.shape[1]
    for i in range(rows):
        for j in range(2 * half):
            code = int(q[i, j // 2]) >> 4 * (j % 2) & 15
            result[i, j] = table[code] * np.float32(scale[i, j // group])
            if offset is not None:
                result[i, j] += np.float32(offset[i, j // group])
    return result


@pytest.mark.parametrize("codebook", CODEBOOKS)
def test_quantized_values_are_the_nearest_numbers(codebook: str) -> None:
    for group, is_integral in ((32, False), (64, True)):
        weights = RNG.standard_normal((24, 128)).astype(np.float32) * 0.05
        weights[3, :group] = 0.0
        encoded = encode(weights, codebook, group, is_integral)
        assert encoded.table.tolist() == table_of(codebook, is_integral).tolist()
        assert encoded.scale.dtype == np.float16
        numbers = reference(encoded.quantized, encoded.table, encoded.scale)
        np.testing.assert_array_equal(ops.dequantize_groups(encoded.quantized, encoded.table, encoded.scale), numbers)
        scales = np.repeat(np.float32(encoded.scale), group, axis=1)
        nearest = np.abs(encoded.table * scales[..., None] - weights[..., None]).min(-1)
        np.testing.assert_allclose(np.abs(numbers - weights), nearest, atol=1e-6)
        assert error(numbers, weights) < LOSS[codebook] * (1.15 if group == 64 else 1)
        if codebook == "mxfp4":
            assert (np.frexp(np.float32(encoded.scale))[0] == 0.5).all()


def test_wide_ranges_have_float32_scales() -> None:
    weights = RNG.standard_normal((4, 64)).astype(np.float32) * 1e9
    encoded = encode(weights, "int4", 32)
    assert encoded.scale.dtype == np.float32
    assert error(reference(encoded.quantized, encoded.table, encoded.scale), weights) < 0.1


@pytest.mark.parametrize("activations", ["float32", "bfloat16", "dynamic"])
@pytest.mark.parametrize("codebook", CODEBOOKS)
def test_models_read_quantized_values(exact: Any, codebook: str, activations: str) -> None:
    model = quantized(exact, weights=codebook, activations=activations)
    assert error(model({"input": X})["output"], exact({"input": X})["output"]) < 2 * LOSS[codebook]
    assert sum(node.op is ops.dequantize_groups for node in model.graph.nodes) == 3
    constants = [i.type for i in model.graph.inputs if i.role == "constant"]
    assert not [t for t in constants if t.dtype.name == "float32" and len(t.shape) == 2]
    assert f"3 weights are {codebook} in groups of 32: 11,808 bytes instead of 83,968" in str(model.decisions)


def test_parameters_of_a_call_are_not_quantized_and_the_decision_says_so(exact: Any) -> None:
    setting = {"weights": "int4"}
    model = ml.compile(exact.model, "numpy", shapes=SHAPES, static_inference=True, quantization=setting)
    result = model.evaluate(exact.params, {"input": X})["output"]
    assert error(result, exact({"input": X})["output"]) < 1e-6
    assert "deferred: quantization waits for bind(params): a program without bound ones computes in float32" in str(
        model.decisions
    )
    assert error(model.bind(exact.params)({"input": X})["output"], result) > 1e-3


def test_layers_stay_in_float(exact: Any) -> None:
    result = exact({"input": X})["output"]
    model = quantized(exact, weights="nf4", keep="l1", group=64)
    model({"input": X})
    assert "'l1' stays float32: it matches 'keep'" in str(model.decisions)
    assert "'l2'" not in str(model.decisions)
    model = quantized(exact, weights="nf4", group=128)
    model({"input": X})
    assert "'l1' stays float32: its 96 inputs are no multiple of the group of 128" in str(model.decisions)
    bounded = ml.calibrate_ranges(exact, [{"input": X}], error=0.08, min_rows=8, quantization={"weights": "nf4"})
    assert 0 < len(bounded.keep) < 3
    model = quantized(exact, weights="nf4", ranges=bounded)
    assert error(model({"input": X})["output"], result) <= 0.08
    assert f"'{bounded.keep[0]}' stays float32: alone it changes results" in str(model.decisions)


def test_products_with_columns_and_tables_of_rows_share_quantized_values() -> None:
    with ml.Builder() as b:
        table = b.param("table", (50, 64), init="normal")
        x = ops.take(table, b.input("i", (3,), "int64"), axis=0)
        w = b.param("w", (64, 32), init="xavier_uniform")
        y = ops.linear(ops.matmul(x, w) @ b.constant(np.eye(32, 64, dtype=np.float32), name="eye"), table)
    graph = b.build({"y": y})
    plain = ml.compile(graph, "numpy", inference=True)
    plain.bind(plain.randomize_params(seed=0))
    model = ml.compile(graph, "numpy", static_inference=True, quantization={"weights": "int4"})
    model.bind(plain.params)
    inputs = {"i": np.array([0, 49, 7])}
    assert error(model(inputs)["y"], plain(inputs)["y"]) < 0.3
    assert sum(node.op is ops.dequantize_groups for node in model.graph.nodes) == 3  # the table, w, eye


def test_embeddings_are_quantized() -> None:
    model = ml.Model()
    model += Embedding(40, 32, name="table")
    model += Linear(32, 16, name="head")
    plain = ml.compile(model, "numpy", shapes={"input": [5]}, inference=True)
    plain.bind(plain.randomize_params(seed=0))
    small = ml.compile(
        model, "numpy", shapes={"input": [5]}, static_inference=True, quantization={"weights": "iq4_nl", "keep": "head"}
    )
    small.bind(plain.params)
    inputs = {"input": np.array([0, 3, 39, 3, 1])}
    assert 0 < error(small(inputs)["output"], plain(inputs)["output"]) < 0.15
    setting = {"weights": "iq4_nl"}
    ranges = ml.calibrate_ranges(plain, [inputs], error=1e-4, min_rows=5, quantization=setting)
    assert set(ranges.keep) == {"table", "head"}, "the error of the table counts"
    setting = {**setting, "ranges": ranges}
    exact = ml.compile(model, "numpy", shapes={"input": [5]}, static_inference=True, quantization=setting)
    assert error(exact.bind(plain.params)(inputs)["output"], plain(inputs)["output"]) < 1e-4


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ({"weights": "int3"}, "unknown dtype 'int3' of weights"),
        ({"weights": "nf4", "activations": "uint8"}, "unknown dtype 'uint8' of activations"),
        ({"weights": "nf4", "group": 48}, "group=48 of nf4 weights"),
        ({"weights": "int8", "group": 32}, "group=32 of int8 weights"),
        ({"weights": "nf4", "per_channel": False}, "per_channel does not go with nf4 weights"),
    ],
)
def test_settings_are_checked(exact: Any, setting: dict[str, Any], text: str) -> None:
    with pytest.raises(OptionError, match=text):
        quantized(exact, **setting)({"input": X})
