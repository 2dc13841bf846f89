"""Static quantization: ranges from samples, pairs around products, layers that stay in float."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mithril as ml
from mithril import InputError, OptionError, ops
from mithril.models import BatchNorm2d, Conv2d, Linear, Relu
from mithril_passes.quantization.calibration import span
from mithril_passes.quantization.static_quantization import affine, encode

RNG = np.random.default_rng(0)
X = RNG.standard_normal((64, 32)).astype(np.float32)
SHAPES = {"input": [64, 32]}


def model_of(*widths: int) -> Any:
    model = ml.Model()
    for k, (size, width) in enumerate(pairwise(widths)):
        if k:
            model += Relu()
        model += Linear(size, width, name=f"l{k}")
    return model


@pytest.fixture
def compiled() -> Any:
    result = ml.compile(model_of(32, 64, 48, 10), "numpy", shapes=SHAPES, inference=True)
    result.bind(result.randomize_params(seed=0))
    return result


def quantized(compiled: Any, **setting: Any) -> Any:
    result = ml.compile(compiled.model, "numpy", shapes=SHAPES, static_inference=True, quantization=setting)
    result.bind(compiled.params)
    return result


def error(a: Any, b: Any) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def count(compiled: Any, op: Any) -> int:
    return sum(node.op is op for node in compiled.graph.nodes)


def test_every_product_reads_quantized_values(compiled: Any) -> None:
    exact = compiled({"input": X})["output"]
    ranges = ml.calibrate_ranges(compiled, [{"input": X}])
    for setting in (
        {"ranges": ranges},
        {"ranges": ranges, "activations": "int8", "per_channel": False},
        {"activations": "dynamic"},
        {},  # dynamic, too
    ):
        model = quantized(compiled, **setting)
        assert 0.0 < error(model({"input": X})["output"], exact) < 0.03
        assert count(model, ops.quantize) == 3
        q = [i for i in model.graph.inputs if i.role == "constant" and i.type.dtype.name == "int8"]
        assert len(q) == 3


def test_ranges_are_those_of_the_samples(compiled: Any, tmp_path: Path) -> None:
    ranges = ml.calibrate_ranges(compiled, [{"input": X[:32]}, {"input": X[32:] * 2}])
    assert ranges.rows == 64
    low, high = ranges.values["input"]
    assert (low, high) == (min(X[:32].min(), 2 * X[32:].min()), max(X[:32].max(), 2 * X[32:].max()))
    ranges.save(tmp_path / "ranges.json")
    assert ml.Ranges.load(tmp_path / "ranges.json") == ranges
    assert "input" in str(ranges)
    from_file = quantized(compiled, ranges=str(tmp_path / "ranges.json"))
    direct = quantized(compiled, ranges=ranges)
    np.testing.assert_array_equal(from_file({"input": X})["output"], direct({"input": X})["output"])


def test_layers_stay_in_float(compiled: Any) -> None:
    ranges = ml.calibrate_ranges(compiled, [{"input": X}])
    model = quantized(compiled, ranges=ranges, keep=["l1", "l2"])
    model({"input": X})
    assert count(model, ops.quantize) == 1
    assert "'l1' stays float32" in str(model.decisions)
    bounded = ml.calibrate_ranges(compiled, [{"input": X}], error=0.008)
    assert bounded.keep
    assert bounded.errors[bounded.keep[0]] == max(bounded.errors.values())
    model, exact = quantized(compiled, ranges=bounded), compiled({"input": X})["output"]
    assert error(model({"input": X})["output"], exact) <= 0.008
    assert f"'{bounded.keep[0]}' stays float32: alone it changes results" in str(model.decisions)


def test_layers_that_the_calibration_excludes_stay_in_float(compiled: Any) -> None:
    ranges = ml.calibrate_ranges(compiled, [{"input": X}], keep="l0")
    assert "layer l0: stays float" in str(ranges)
    model = quantized(compiled, ranges=ranges)
    model({"input": X})
    assert count(model, ops.quantize) == 2
    assert "'l0' stays float32: the calibration excluded it by 'keep'" in str(model.decisions)
    bounded = ml.calibrate_ranges(compiled, [{"input": X}], keep=["l0"], error=0.006)
    assert bounded.keep[0] == "l0" and set(bounded.errors) == {"l1", "l2"}
    model, exact = quantized(compiled, ranges=bounded), compiled({"input": X})["output"]
    assert error(model({"input": X})["output"], exact) <= 0.006


def test_the_selected_outputs_are_calibrated(compiled: Any) -> None:
    part = ml.compile(compiled.model, "numpy", shapes=SHAPES, inference=True, outputs=["l0"])
    part.bind(compiled.params)
    ranges = ml.calibrate_ranges(part, [{"input": X}], error=1.0)
    assert set(ranges.errors) == {"l0"} and set(ranges.values) == {"input"}


def test_decoders_with_a_cache_are_calibrated() -> None:
    """Create the state for the batch of the samples, whose first input has no rows."""
    layer = ml.models.MultiHeadAttention(16, 2, causal=True, cache=8)
    decoder = ml.compile(layer, "numpy", shapes={"query": [None, None, 16]}, inference=True)
    decoder.bind(decoder.randomize_params(0))
    ranges = ml.calibrate_ranges(decoder, [{"query": X[:, None, :16]}], error=0.1)
    assert ranges.rows == 64 and len(ranges.errors) == 4 and max(ranges.errors.values()) > 0


def test_images_have_scales_of_their_own() -> None:
    """Compare images of one batch, of which one is a thousand times as bright."""
    model = ml.Model()
    model += Conv2d(8, 16, 3, padding=1)
    image = RNG.standard_normal((2, 8, 5, 5)).astype(np.float32) * np.array([1, 1000], np.float32).reshape(2, 1, 1, 1)
    settings = {"static_inference": True, "quantization": {"activations": "dynamic"}}
    results, params = {}, None
    for count in (1, 2, None):
        compiled = ml.compile(model, "numpy", shapes={"input": [count, 8, 5, 5]}, **settings)
        params = params or compiled.randomize_params(seed=0)
        results[count] = compiled.bind(params)({"input": image[:count]})["output"]
    np.testing.assert_allclose(results[2][:1], results[1], rtol=1e-6)
    np.testing.assert_array_equal(results[2], results[None])


def test_mixed_precision_leaves_products_of_quantized_values_to_integers(compiled: Any) -> None:
    settings = {"static_inference": True, "mixed_precision": True, "shapes": SHAPES}
    setting = {"activations": "dynamic", "keep": "l1"}
    model = ml.compile(compiled.model, "numpy", quantization=setting, **settings).bind(compiled.params)
    model({"input": X})
    graph = model.graph
    products = [n for n in graph.nodes if n.op is ops.linear]
    operands = [v for n in products for v in n.operands[:2] if v is not None]
    assert [v.dtype.name for v in operands] == ["float32"] * 2 + ["bfloat16"] * 2 + ["float32"] * 2


def test_weights_of_sixteen_bits_are_reported(compiled: Any) -> None:
    settings = {"static_inference": True, "precision": "bfloat16", "quantization": {"activations": "dynamic"}}
    model = ml.compile(compiled.model, "numpy", shapes=SHAPES, **settings).bind(compiled.params)
    model({"input": X})
    assert "'l0' stays bfloat16: weights are quantized from float32" in str(model.decisions)


def test_residual_additions_and_pools_read_quantized_values() -> None:
    image = RNG.standard_normal((4, 3, 8, 8)).astype(np.float32)
    with ml.Builder() as b:
        x = b.input("image", (4, 3, 8, 8))
        v, w = b.param("v", (16, 3, 3, 3), init="xavier_uniform"), b.param("w", (16, 16, 3, 3), init="xavier_uniform")
        first = ops.relu(ops.conv(x, v, stride=(1, 1), padding=((1, 1), (1, 1)), dilation=(1, 1)))
        second = ops.conv(first, w, stride=(1, 1), padding=((1, 1), (1, 1)), dilation=(1, 1))
        result = ops.max_pool(first + second, kernel=(2, 2), stride=(2, 2))
    model = b.build({"sum": result})
    float_model = ml.compile(model, "numpy", inference=True)
    float_model.bind(float_model.randomize_params(seed=0))
    ranges = ml.calibrate_ranges(float_model, [{"image": image}], min_rows=4)
    result = ml.compile(model, "numpy", static_inference=True, quantization={"ranges": ranges})
    result.bind(float_model.params)
    assert error(result({"image": image})["sum"], float_model({"image": image})["sum"]) < 0.03
    graph = result.graph
    (add,) = [n for n in graph.nodes if n.op is ops.add]
    producers = [graph.producers[v].op for v in add.operands]
    assert ops.dequantize in producers


def test_dynamic_products_of_sequences_with_residuals() -> None:
    model = ml.models.TransformerEncoder(1, 32, 4, dropout=0.0)
    x = RNG.standard_normal((2, 5, 32)).astype(np.float32)
    shapes = {"input": [2, 5, 32]}
    exact = ml.compile(model, "numpy", shapes=shapes, inference=True)
    exact.bind(exact.randomize_params(seed=0))
    setting = {"activations": "dynamic"}
    small = ml.compile(model, "numpy", shapes=shapes, static_inference=True, quantization=setting).bind(exact.params)
    assert error(small({"input": x})["output"], exact({"input": x})["output"]) < 0.02
    assert count(small, ops.quantize) == 4


def test_trained_scales_are_used() -> None:
    with ml.Builder() as b:
        x, w = b.input("x", (4, 32)), b.constant(RNG.standard_normal((16, 32)).astype(np.float32), name="w")
        scale = b.constant(0.05, "float32")
        y = ops.linear(ops.fake_quantize(x, scale), w)
    graph = b.build({"y": y})
    setting = {"static_inference": True, "quantization": {"activations": "dynamic"}}
    model = ml.compile(graph, "numpy", **setting)
    x = RNG.standard_normal((4, 32)).astype(np.float32)
    rounded = np.clip(np.rint(x / np.float32(0.05)), -128, 127) * np.float32(0.05)
    q, scales = encode(np.asarray(graph.input_of[w].data), 0)
    np.testing.assert_allclose(model({"x": x})["y"], rounded @ (q * scales[:, None]).T, rtol=1e-4, atol=1e-5)
    assert count(model, ops.fake_quantize) == 0


def test_methods_cut_outliers() -> None:
    numbers = [np.append(np.maximum(RNG.standard_normal(20000), 0), 40).astype(np.float32)]
    assert span(numbers, "minmax", 0)[1] == 40
    assert 2 < span(numbers, "percentile", 99.9)[1] < 5
    assert 2 < span(numbers, "entropy", 0)[1] < 20


def test_ranges_contain_zero() -> None:
    assert affine((1.0, 2.0), "uint8") == (float(np.float32(2 / 255)), 0)
    assert affine((-1.0, 0.0), "uint8")[1] == 255
    assert affine((0.0, 0.0), "uint8") == (1.0, 0)
    assert affine((-3.0, 2.0), "int8") == (float(np.float32(3 / 127)), 0)


def test_errors_say_what_to_do(compiled: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="got 8 rows, expected at least 32"):
        ml.calibrate_ranges(compiled, [{"input": X[:8]}])
    with pytest.raises(OptionError, match="unknown method 'min' of calibrate_ranges"):
        ml.calibrate_ranges(compiled, [{"input": X}], method="min")
    for name, value in (("percentile", 40), ("percentile", np.nan), ("error", -0.1), ("error", np.nan)):
        with pytest.raises(OptionError, match=f"{name}={value}, expected"):
            ml.calibrate_ranges(compiled, [{"input": X}], **{name: value})
    with pytest.raises(OptionError, match="'l9' in keep of calibrate_ranges matches no layer"):
        ml.calibrate_ranges(compiled, [{"input": X}], keep="l9")
    with pytest.raises(InputError, match="a batch is a mapping from inputs to arrays, got ndarray"):
        ml.calibrate_ranges(compiled, [X])
    with pytest.raises(InputError, match="got 0 rows"):
        ml.calibrate_ranges(compiled, [], min_rows=0, error=0.1)
    with pytest.raises(InputError, match="requires bound parameters"):
        ml.calibrate_ranges(ml.compile(compiled.model, "numpy", shapes=SHAPES, inference=True), [{"input": X}])
    with pytest.raises(OptionError, match="need ranges"):
        quantized(compiled, activations="uint8")({"input": X})
    with pytest.raises(OptionError, match="static_inference=True"):
        ml.compile(compiled.model, "numpy", shapes=SHAPES, inference=True, quantization={"activations": "dynamic"})
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(InputError, match="has no ranges"):
        quantized(compiled, ranges=str(tmp_path / "bad.json"))({"input": X})


def test_running_statistics_are_calibrated() -> None:
    """Batch norms fold into the weights with the bound statistics, not with the initial ones."""
    image = RNG.standard_normal((32, 3, 8, 8)).astype(np.float32)
    model = ml.Model()
    model += Conv2d(3, 16, 3, padding=1, name="a")
    model += BatchNorm2d(16, name="norm")
    model += Relu()
    model += Conv2d(16, 16, 3, padding=1, name="b")
    exact = ml.compile(model, "numpy", shapes={"input": [32, 3, 8, 8]}, inference=True)
    params = exact.randomize_params(seed=0)
    state = {
        n: np.full(np.shape(x), 0.05 if "mean" in n else 0.01, np.float32) for n, x in exact.initial_state().items()
    }
    exact.bind(params, state)
    ranges = ml.calibrate_ranges(exact, [{"input": image}])
    result = ml.compile(
        model, "numpy", shapes={"input": [32, 3, 8, 8]}, static_inference=True, quantization={"ranges": ranges}
    )
    result.bind(params, state)
    assert error(result({"input": image})["output"], exact({"input": image})["output"]) < 0.03
    assert count(result, ops.quantize) == 2


def test_rows_of_rank_three_are_added_to_an_earlier_value():
    """Replace a product of rank 3 by one of rows, in its position."""
    x = ml.IOKey("input")
    model = ml.Model.create(outputs={"output": x + Linear(16)(x)})
    options = {"static_inference": True, "quantization": {"activations": "dynamic"}}
    compiled = ml.compile(model, "numpy", shapes={"input": [None, None, 16]}, **options)
    plain = ml.compile(model, "numpy", shapes={"input": [2, 3, 16]}, inference=True)
    params = plain.randomize_params(0)
    rows = np.random.default_rng(0).normal(size=(2, 3, 16)).astype(np.float32)
    expected = plain.evaluate(params, {"input": rows})["output"]
    np.testing.assert_allclose(compiled.bind(params)({"input": rows})["output"], expected, atol=0.05)


@pytest.mark.parametrize("activations", ["trained", "dynamic", "uint8"])
def test_weights_keep_the_scales_of_the_training(activations: str) -> None:
    """Store quantized weights as they were trained: those by the largest number of a row would be others."""
    x = RNG.standard_normal((40, 64)).astype(np.float32)

    class Trained(ml.models.Layer):
        inputs = ("input",)

        def build(self, x: Any) -> Any:
            w, scale = self.param("weight", (48, 64), "normal"), self.param("scale", (48,), "ones")
            if activations == "trained":
                x = ops.fake_quantize(x, self.param("step", (), "ones"))
            return ops.linear(x, ops.fake_quantize(w, scale, axis=0))

    exact = ml.compile(Trained(), "numpy", shapes={"input": [40, 64]}, inference=True)
    scales = {"scale": RNG.uniform(0.04, 0.06, 48).astype(np.float32), "step": np.float32(0.03)}
    exact.bind({n: np.asarray(scales.get(n, p)) for n, p in exact.randomize_params(seed=0).items()})
    setting: dict[str, Any] = {"activations": "dynamic"}
    if activations == "uint8":
        setting = {"ranges": ml.calibrate_ranges(exact, [{"input": x}])}
    model = ml.compile(Trained(), "numpy", shapes={"input": [40, 64]}, static_inference=True, quantization=setting)
    model.bind(exact.params)
    limit = {"trained": 1e-6, "dynamic": 0.01, "uint8": 0.01}[activations]
    assert error(model({"input": x})["output"], exact({"input": x})["output"]) < limit
    (q,) = [i.data for i in model.graph.inputs if i.type.dtype.name == "int8"]
    expected = np.rint(exact.params["weight"] / exact.params["scale"][:, None])
    np.testing.assert_array_equal(q, np.clip(expected, -128, 127))
    assert count(model, ops.quantize) == 1
