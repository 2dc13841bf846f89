"""A model imported from ONNX is fine-tuned on every framework, exported, and keeps its names and numbers."""

import re
from pathlib import Path

import numpy as np
import pytest

import mithril as ml

onnx = pytest.importorskip("onnx")
h = onnx.helper
pytestmark = pytest.mark.filterwarnings("ignore")
rng = np.random.default_rng(0)


def classifier():
    """Convolution, batch norm, pooling and a linear layer, with weights."""
    tensors = {
        "conv.weight": rng.normal(size=(4, 1, 3, 3)) * 0.3,
        "bn.scale": np.ones(4),
        "bn.bias": np.zeros(4),
        "bn.mean": np.zeros(4),
        "bn.var": np.ones(4),
        "fc.weight": rng.normal(size=(2, 4)),
        "fc.bias": np.zeros(2),
    }
    norm = [f"bn.{n}" for n in ("scale", "bias", "mean", "var")]
    nodes = [
        h.make_node("Conv", ["image", "conv.weight"], ["a"], pads=[1, 1, 1, 1]),
        h.make_node("BatchNormalization", ["a", *norm], ["b"]),
        h.make_node("Relu", ["b"], ["c"]),
        h.make_node("GlobalAveragePool", ["c"], ["d"]),
        h.make_node("Flatten", ["d"], ["e"]),
        h.make_node("Gemm", ["e", "fc.weight", "fc.bias"], ["logits"], transB=1),
    ]
    graph = h.make_graph(
        nodes,
        "classifier",
        [h.make_tensor_value_info("image", 1, ["batch", 1, 6, 6])],
        [h.make_tensor_value_info("logits", 1, ["batch", 2])],
        [onnx.numpy_helper.from_array(v.astype(np.float32), n) for n, v in tensors.items()],
    )
    return h.make_model(graph, opset_imports=[h.make_opsetid("", 20)]), tensors


PROTO, TENSORS = classifier()
LABELS = np.arange(32, dtype=np.int32) % 2
IMAGES = (rng.normal(size=(32, 1, 6, 6)) + 2.0 * LABELS[:, None, None, None]).astype(np.float32)


@pytest.mark.parametrize("backend", ["numpy", "jax", "torch"])
def test_fine_tuning(backend):
    model = ml.from_onnx(PROTO)
    trainer = ml.Trainer(
        model, ml.Adam(learning_rate=0.03), loss="cross_entropy", backend=backend, progress=False,
        shapes={"image": [16, 1, 6, 6]},
    )  # fmt: skip
    trainer.fit(ml.DataLoader((IMAGES, LABELS), batch_size=16), epochs=8)
    assert trainer.history["loss"][-1] < 0.7 * trainer.history["loss"][0]
    compiled = trainer.compiled
    assert set(compiled.params) == {"conv.weight", "bn.scale", "bn.bias", "fc.weight", "fc.bias"}
    change = np.abs(np.asarray(compiled.backend.to_numpy(compiled.params["conv.weight"])) - TENSORS["conv.weight"])
    assert change.max() > 1e-3


@pytest.mark.parametrize("backend", ["numpy", "jax", "torch", "c"])
def test_round_trip(backend, tmp_path):
    compiled = ml.compile(ml.from_onnx(PROTO), backend, shapes={"image": [4, 1, 6, 6]}, inference=True)
    expected = compiled.backend.to_numpy(compiled({"image": IMAGES[:4]})["logits"])
    compiled.export(tmp_path / "again.onnx")
    again = ml.load(tmp_path / "again.onnx", backend=backend, shapes={"image": [4, 1, 6, 6]})
    assert set(again.params) == set(compiled.params)
    assert set(again.initial_state()) == set(compiled.initial_state()) == {"bn.mean", "bn.var"}
    np.testing.assert_array_equal(again.backend.to_numpy(again({"image": IMAGES[:4]})["logits"]), expected)


def test_the_page_about_onnx():
    """Run the blocks of docs/onnx.md in order."""
    page = (Path(__file__).parents[1] / "docs" / "onnx.md").read_text()
    names = {}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(compile(block, "docs/onnx.md", "exec"), names)
