"""Operators of com.microsoft, compared with onnxruntime."""

import numpy as np
import onnx
import onnx.helper as h
import pytest

import mithril as ml

ort = pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.filterwarnings("ignore")
rng = np.random.default_rng(0)


def f(*shape):
    return rng.normal(size=shape).astype(np.float32)


def u8(*shape):
    return rng.integers(0, 255, shape).astype(np.uint8)


def i32(*values):
    return np.asarray(values, np.int32)


S, Z = np.float32(0.03), np.uint8(120)  # a scale and a zero point
ANGLES = np.outer(np.arange(16), np.arange(8) / 8).astype(np.float32)
COS16, SIN16 = np.cos(ANGLES), np.sin(ANGLES)
COS, SIN = COS16[:, :4].copy(), SIN16[:, :4].copy()
MASK = np.asarray([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], np.int32)
CASES = {
    "BiasGelu": ([f(2, 3, 8), f(8)], 1, {}),
    "FastGelu": ([f(2, 3, 8), f(8)], 1, {}),
    "Gelu": ([f(2, 8)], 1, {}),
    "QuickGelu": ([f(2, 8)], 1, {}),
    "FusedMatMul": ([f(2, 4, 3), f(2, 4, 5)], 1, {"transA": 1, "alpha": 0.5}),
    "SkipLayerNormalization": ([f(2, 3, 8), f(2, 3, 8), f(8), f(8), f(8)], 4, {"epsilon": 1e-5}),
    "SkipSimplifiedLayerNormalization": ([f(2, 3, 8), f(2, 3, 8), f(8)], 4, {"epsilon": 1e-5}),
    "EmbedLayerNormalization": (
        [i32([1, 2, 3], [4, 0, 1]), i32([0, 0, 1], [1, 1, 0]), f(6, 8), f(5, 8), f(2, 8), f(8), f(8)],
        2, {"epsilon": 1e-5},
    ),
    "MultiHeadAttention": ([f(2, 5, 16), f(2, 5, 16), f(2, 5, 16), f(48), MASK], 1, {"num_heads": 2}),
    "MultiHeadAttention past": (
        [f(2, 3, 16), f(2, 3, 16), f(2, 3, 16), None, None, None, f(2, 2, 4, 8), f(2, 2, 4, 8)], 3, {"num_heads": 2},
    ),
    "MultiHeadAttention causal": ([f(2, 5, 16), f(2, 5, 16), f(2, 5, 16)], 1, {"num_heads": 2, "unidirectional": 1}),
    "Attention": ([f(2, 5, 16), f(16, 48), f(48), MASK], 1, {"num_heads": 2}),
    "Attention lengths": ([f(2, 5, 16), f(16, 48), f(48), i32(5, 3)], 1, {"num_heads": 2, "unidirectional": 1}),
    "Attention past": (
        [f(2, 5, 16), f(16, 48), f(48), None, f(2, 2, 2, 3, 8)], 2, {"num_heads": 2, "unidirectional": 1},
    ),
    "GroupQueryAttention prompt": (
        [f(2, 5, 64), f(2, 5, 32), f(2, 5, 32), None, None, i32(4, 4), np.int32(5), COS16, SIN16], 3,
        {"num_heads": 4, "kv_num_heads": 2, "do_rotary": 1},
    ),
    "GroupQueryAttention step": (
        [
            f(2, 1, 64), f(2, 1, 32), f(2, 1, 32), f(2, 2, 6, 16), f(2, 2, 6, 16), i32(6, 6), np.int32(7), COS16, SIN16,
        ], 3,
        {"num_heads": 4, "kv_num_heads": 2, "do_rotary": 1},
    ),
    "GroupQueryAttention window": (
        [f(1, 6, 64), None, None, None, None, i32(5), np.int32(6)], 3,
        {"num_heads": 4, "kv_num_heads": 2, "local_window_size": 3},
    ),
    "RotaryEmbedding": ([f(2, 3, 16), np.asarray([[0, 1, 2], [3, 4, 5]]), COS, SIN], 1, {"interleaved": 1}),
    "RotaryEmbedding offset": ([f(2, 3, 16), np.asarray([2]), COS, SIN], 1, {}),
    "MatMulNBits": (
        [f(3, 40), u8(6, 3, 8), f(18)], 1, {"K": 40, "N": 6, "bits": 4, "block_size": 16},
    ),
    "MatMulNBits zero": (
        [f(3, 48), u8(6, 3, 8), f(18), u8(12)], 1, {"K": 48, "N": 6, "bits": 4, "block_size": 16},
    ),
    "MatMulNBits groups": ([f(3, 64), u8(40, 2, 16), f(80)], 1, {"K": 64, "N": 40, "bits": 4, "block_size": 32}),
    "QLinearAdd": ([u8(2, 5), S, Z, u8(2, 5), S, Z, np.float32(0.05), Z], 1, {}),
    "QLinearMul": ([u8(2, 5), S, Z, u8(2, 5), S, Z, np.float32(0.1), Z], 1, {}),
    "QLinearSigmoid": ([u8(2, 5), S, Z, np.float32(1 / 256), np.uint8(0)], 1, {}),
    "QLinearLeakyRelu": ([u8(2, 5), S, Z, S, Z], 1, {"alpha": 0.1}),
    "QLinearConcat": ([S, Z, u8(2, 5), S, Z, u8(2, 3), np.float32(0.05), Z], 1, {"axis": 1}),
    "QLinearGlobalAveragePool": ([u8(1, 3, 4, 4), S, Z, S, Z], 1, {}),
    "QLinearAveragePool": ([u8(1, 3, 4, 4), S, Z, S, Z], 1, {"kernel_shape": [2, 2], "strides": [2, 2]}),
    "QGemm": ([u8(2, 5), S, Z, u8(5, 3), S, Z, i32(1, 2, 3), np.float32(0.5), Z], 1, {}),
    "MatMulIntegerToFloat": ([u8(2, 5), u8(5, 3), S, S, Z, Z], 1, {}),
    "DynamicQuantizeMatMul": ([f(2, 5), u8(5, 3), S, Z], 1, {}),
    "FusedConv": ([f(1, 3, 5, 5), f(4, 3, 3, 3), f(4)], 1, {"activation": "Relu", "pads": [1, 1, 1, 1]}),
    "FusedGemm": ([f(2, 3), f(3, 4), f(4)], 1, {"activation": "Tanh"}),
}  # fmt: skip
FIXED = dict.fromkeys(
    ("MatMulNBits", "MatMulNBits zero", "MatMulNBits groups"), (1, 2, 3)
)  # operands that are initializers


@pytest.mark.parametrize("name", CASES)
def test_operator(name):
    arrays, results, attributes = CASES[name]
    names = ["" if a is None else f"x{k}" for k, a in enumerate(arrays)]
    fixed = FIXED.get(name, ())
    inputs, initializers = [], []
    for k, (n, a) in enumerate(zip(names, arrays)):
        if n and k in fixed:
            initializers.append(onnx.numpy_helper.from_array(np.asarray(a), n))
        elif n:
            inputs.append(h.make_tensor_value_info(n, h.np_dtype_to_tensor_dtype(np.asarray(a).dtype), np.shape(a)))
    outputs = [f"y{k}" if k in (0, results - 1) or "Attention" in name else "" for k in range(results)]
    node = h.make_node(name.split()[0], names, outputs, domain="com.microsoft", **attributes)
    graph = h.make_graph([node], "g", inputs, [onnx.ValueInfoProto(name=o) for o in outputs if o], initializers)
    model = h.make_model(
        graph, opset_imports=[h.make_opsetid("", 20), h.make_opsetid("com.microsoft", 1)], ir_version=9
    )
    feeds = {i.name: np.asarray(arrays[names.index(i.name)]) for i in inputs}
    expected = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feeds)
    actual = ml.compile(ml.from_onnx(model), "numpy", inference=True)(feeds)
    for result, want in zip(actual.values(), expected, strict=True):
        result = np.asarray(result)
        assert result.dtype == want.dtype and result.shape == want.shape
        if want.dtype.kind == "f":
            np.testing.assert_allclose(result, want, rtol=1e-4, atol=1e-4 * max(1, np.abs(want).max()))
        else:  # a rounding of halves after float32 arithmetic in another order
            assert np.abs(result.astype(int) - want.astype(int)).max() <= 1
