"""Export of compiled models: checked by onnx.checker and onnxruntime, and read back with equal names and numbers."""

import numpy as np
import onnx
import pytest

import mithril as ml
from mithril import ops
from mithril.models import (
    BatchNorm2d,
    Conv2d,
    Embedding,
    GroupNorm,
    LayerNorm,
    Linear,
    MaxPool2d,
    Model,
    Relu,
    RMSNorm,
    Sequential,
    TransformerEncoderLayer,
)
from mithril_onnx.export.writer import Writer

ort = pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.filterwarnings("ignore")


def runtime(path, inputs):
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return dict(zip([o.name for o in session.get_outputs()], session.run(None, inputs)))


def exported(model, inputs, path, opset=23, shapes=None, **options):
    """Compile, export, and compare mithril, onnxruntime and the file read back."""
    shapes = shapes or {n: list(x.shape) for n, x in inputs.items()}
    types = {n: str(x.dtype) for n, x in inputs.items()}
    compiled = ml.compile(model, "numpy", shapes=shapes, types=types, inference=True)
    if compiled.params is None:
        compiled.bind(compiled.randomize_params(3))
    compiled.export(path, opset=opset, **options)
    outputs = {n: np.asarray(y) for n, y in compiled(inputs).items()}
    for name, y in runtime(path, inputs).items():
        np.testing.assert_allclose(y, outputs[name], rtol=1e-4, atol=2e-5)
    back = ml.load(path, backend="numpy")
    assert set(back.params or {}) == set(compiled.params or {})
    for name, y in back(inputs).items():
        np.testing.assert_allclose(np.asarray(y), outputs[name], rtol=1e-5, atol=1e-6)
    return compiled, back


def encoder():
    model = ml.Model()
    model |= Embedding(50, 16)(input="ids", output="h")
    model |= TransformerEncoderLayer(16, 4, 32)(input="h", output="e")
    model |= LayerNorm(16)(input="e", output="n")
    model |= RMSNorm(16)(input="n", output="m")
    model |= Linear(8)(input="m", output="logits")
    return model


@pytest.mark.parametrize("opset", [17, 21, 23])
def test_an_encoder_with_open_sizes(tmp_path, opset):
    ids = np.random.default_rng(0).integers(0, 50, (2, 7)).astype(np.int32)
    compiled, back = exported(encoder(), {"ids": ids}, tmp_path / "m.onnx", opset, {"ids": ["batch", "length"]})
    kinds = {n.op_type for n in onnx.load(tmp_path / "m.onnx").graph.node}
    assert ("Attention" in kinds) == ("RMSNormalization" in kinds) == (opset >= 23)
    other = np.arange(15, dtype=np.int32).reshape(3, 5)
    expected = np.asarray(compiled({"ids": other})["logits"])
    np.testing.assert_allclose(runtime(tmp_path / "m.onnx", {"ids": other})["logits"], expected, rtol=1e-4, atol=2e-5)
    np.testing.assert_allclose(np.asarray(back({"ids": other})["logits"]), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("opset", [17, 23])
def test_a_convolutional_network(tmp_path, opset):
    model = ml.Model()
    model |= Conv2d(3, 8, 3, padding=1)(input="x", output="a")
    model |= BatchNorm2d(8)(input="a", output="b")
    model |= Relu()(input="b", output="c")
    model |= MaxPool2d(2)(input="c", output="d")
    model |= GroupNorm(2)(input="d", output="e")
    x = np.random.default_rng(0).normal(size=(2, 3, 8, 8)).astype(np.float32)
    exported(model, {"x": x}, tmp_path / "m.onnx", opset)


def layer(function):
    class Written(ml.models.Layer):
        def build(self, input):
            return function(input)

    model = ml.Model()
    model |= Written()(input="x", output="y")
    return model


def shifted(x):
    """Move rows, doubled, to computed places in a loop; the first and the last place are out of bounds."""

    def step(states):
        n, y = states
        row = ops.dynamic_slice(x, ops.stack(n + 1, np.int32(0)), sizes=(1, 4))
        return n + 1, ops.dynamic_update_slice(y, row * 2.0, ops.stack(n - 4, np.int32(0)))

    return ops.while_loop(lambda states: states[0] < 3, step, (np.int32(0), x))[1]


def attention(x, mask):
    """Attend within the rows, by two heads."""
    heads = ops.stack(x, x * 0.5)[None]
    return ops.attention(heads, heads, heads, mask)


FUNCTIONS = {
    "slices at computed places": shifted,
    "expm1 log1p": lambda x: ops.log1p(ops.abs(ops.expm1(x))),
    "floordiv mod": lambda x: ops.floordiv(x, 0.3) + ops.mod(x, 0.7),
    "atan2": lambda x: ops.atan2(x, ops.flip(x, axis=(1,))),
    "sort": lambda x: ops.sort(x, axis=1, descending=True),
    "trunc isfinite": lambda x: ops.where(ops.isfinite(x), ops.trunc(x * 3.0), 0.0),
    "any all": lambda x: ops.cast(ops.any(x > 0.0, axis=1), dtype="float32"),
    "slices": lambda x: x[:, ::-2] + x[:, :2],
    "gelu": lambda x: ops.gelu(x) + ops.gelu(x, approximate="tanh"),
    "pad": lambda x: ops.pad(x, widths=((1, 1), (0, 2)), mode="reflect"),
    "scatter": lambda x: ops.scatter_nd_add(x, np.asarray([[0], [0]]), x[:2]),
    "linear with activation": lambda x: ops.linear(x, np.ones((2, 4), np.float32), activation="gelu_tanh"),
    "scan": lambda x: ops.scan(lambda c, row: (c + row, c * row), x[0], x)[1],
    "scan without sequences": lambda x: ops.scan(lambda c, _: (c * 0.5, c + x), x, length=3)[1],
    "scan of open length, reversed": lambda x: ops.scan(
        lambda c, _: (c * 0.5, c), x[0], length=x.shape[0], reverse=True
    )[1],
    "loop": lambda x: ops.while_loop(lambda s: ops.sum(s) < 100.0, lambda s: s * 2.0 + 1.0, x),
    "if": lambda x: ops.cond(ops.sum(x) > 0.0, lambda: x + 1.0, lambda: x - 1.0),
    "grid_sample": lambda x: ops.grid_sample(
        x[None, None], ops.reshape(x, shape=(1, x.shape[0], 2, 2)), padding_mode="reflection"
    ),
    "grid_sample cubic": lambda x: ops.grid_sample(
        x[None, None], ops.reshape(x, shape=(1, x.shape[0], 2, 2)), mode="bicubic", align_corners=True
    ),
    "roi_align": lambda x: ops.roi_align(x[None, None], ops.abs(x) * 2.0, np.zeros(3, np.int32), size=(2, 1)),
    "attention, a mask of keys": lambda x: attention(x, x[:, 0] > 0.0),
    "attention, a mask without queries": lambda x: attention(x, (x[:, 0] > 0.0)[None, None, None]),
    "attention, a mask without keys": lambda x: attention(x, x[:, :1] > 0.0),
    "attention, a bias of keys": lambda x: attention(x, x[None, :, 0]),
    "attention, a bias": lambda x: attention(x, ops.matmul(x, ops.transpose(x))),
    "cumprod": lambda x: ops.cumprod(x, axis=1, reverse=True) + ops.cumprod(x, axis=0, exclusive=True),
    "cumprod of int32": lambda x: ops.cumprod(ops.cast(x * 3.0, dtype="int32"), axis=0, reverse=True, exclusive=True),
    "cumprod of a vector": lambda x: ops.cumprod(x[:, 0], axis=0),
    "iota": lambda x: x + ops.cast(ops.iota(shape=x.shape, axis=0), dtype="float32"),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("open_sizes", [False, True])
def test_operations(tmp_path, name, open_sizes):
    if open_sizes and name in ("scatter", "roi_align"):
        pytest.skip("it indexes rows by number")
    x = np.random.default_rng(1).normal(size=(3, 4)).astype(np.float32)
    exported(layer(FUNCTIONS[name]), {"x": x}, tmp_path / "m.onnx", 23, {"x": ["rows", 4]} if open_sizes else None)


def test_outputs_keep_their_names(tmp_path):
    model = Sequential(Linear(3), Relu())
    compiled = ml.compile(model, "numpy", shapes={"input": [2, 4]}, outputs=["0", "output"], inference=True)
    compiled.export(tmp_path / "names.onnx", params=compiled.randomize_params(0))
    again = ml.from_onnx(tmp_path / "names.onnx")
    assert again.outputs == ("0", "output")
    inner = Model()
    inner |= again(input="input", **{"0": "h", "output": "y"})
    for loaded in (ml.compile(again, "numpy", inference=True), ml.load(tmp_path / "names.onnx", backend="numpy")):
        assert set(loaded({"input": np.ones((2, 4), np.float32)})) == {"0", "output"}
    assert inner.outputs == ("h", "y")


def test_an_attribute_that_a_row_does_not_read_is_decomposed(tmp_path):
    x = np.ones((2, 4), np.float32)
    exported(layer(FUNCTIONS["linear with activation"]), {"x": x}, tmp_path / "m.onnx")
    kinds = {n.op_type for n in onnx.load(tmp_path / "m.onnx").graph.node}
    assert kinds & {"Gelu", "Tanh"}


def test_weights_in_a_file_of_their_own(tmp_path):
    model = ml.Model()
    model |= Linear(64)(input="x", output="y")
    x = np.ones((2, 32), np.float32)
    _, back = exported(model, {"x": x}, tmp_path / "m.onnx", external=True)
    assert (tmp_path / "m.onnx.data").stat().st_size >= 64 * 32 * 4
    assert (tmp_path / "m.onnx").stat().st_size < 4096
    assert back.params


def test_an_operation_without_a_row_is_named(tmp_path):
    compiled = ml.compile(layer(lambda x: ops.erfinv(x)), "numpy", shapes={"x": [2]}, inference=True)
    with pytest.raises(ml.UnsupportedError, match="erfinv"):
        compiled.export(tmp_path / "m.onnx")
    assert not (tmp_path / "m.onnx").exists()


def test_opset_out_of_range(tmp_path):
    compiled = ml.compile(layer(ops.relu), "numpy", shapes={"x": [2]}, inference=True)
    with pytest.raises(ml.InputError, match="opset=9"):
        compiled.export(tmp_path / "m.onnx", opset=9)


def test_large_constants_that_are_freed_stay_different():
    writer = Writer(20)
    names = [writer.constant(np.full(2000, k, np.float32)) for k in range(3)]  # each may have the address of the last
    assert len({*names}) == 3
