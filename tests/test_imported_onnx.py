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


def trees():
    """Return a regressor of two trees with nan and two targets, its nodes and its leaves as rows."""
    rows = [  # tree, node, column, threshold, mode, true, false, nan is true
        (0, 0, 0, 0.0, "BRANCH_LEQ", 1, 2, 1), (0, 1, 1, 1.0, "BRANCH_EQ", 3, 4, 0), (0, 2, 0, 0, "LEAF", 0, 0, 0),
        (0, 3, 0, 0, "LEAF", 0, 0, 0), (0, 4, 2, -1.0, "BRANCH_GT", 5, 6, 0), (0, 5, 0, 0, "LEAF", 0, 0, 0),
        (0, 6, 0, 0, "LEAF", 0, 0, 0), (1, 0, 2, 0.0, "BRANCH_NEQ", 1, 2, 0), (1, 1, 0, 0, "LEAF", 0, 0, 0),
        (1, 2, 0, 0, "LEAF", 0, 0, 0),
    ]  # fmt: skip
    names = ("treeids", "nodeids", "featureids", "values", "modes", "truenodeids", "falsenodeids")
    attributes = {f"nodes_{n}": [r[k] for r in rows] for k, n in enumerate((*names, "missing_value_tracks_true"))}
    leaves = [(t, n, k % 2, 0.5 * k - 1) for k, (t, n) in enumerate([(0, 2), (0, 3), (0, 5), (0, 6), (1, 1), (1, 2)])]
    weights = {f"target_{n}": [r[k] for r in leaves] for k, n in enumerate(("treeids", "nodeids", "ids", "weights"))}
    node = h.make_node(
        "TreeEnsembleRegressor", ["x"], ["y"], domain="ai.onnx.ml", n_targets=2, **attributes, **weights
    )  # fmt: skip
    x, y = (h.make_tensor_value_info(n, 1, ["n", k]) for n, k in (("x", 3), ("y", 2)))
    proto = h.make_model(
        h.make_graph([node], "g", [x], [y]), opset_imports=[h.make_opsetid("", 20), h.make_opsetid("ai.onnx.ml", 3)]
    )
    return proto, rows, leaves


def walk(x, rows, leaves):
    """Follow one row of x through the trees, node by node."""
    tests = {
        "BRANCH_LEQ": lambda a, b: a <= b, "BRANCH_EQ": lambda a, b: a == b, "BRANCH_GT": lambda a, b: a > b,
        "BRANCH_NEQ": lambda a, b: a != b,
    }  # fmt: skip
    table = {(r[0], r[1]): r for r in rows}
    total = np.zeros(2, np.float32)
    for tree in (0, 1):
        node = table[tree, 0]
        while node[4] != "LEAF":
            holds = tests[node[4]](x[node[2]], node[3]) or (np.isnan(x[node[2]]) and node[7])
            node = table[tree, node[5] if holds else node[6]]
        for t, n, target, weight in leaves:
            if (t, n) == node[:2]:
                total[target] += weight
    return total


@pytest.mark.parametrize("backend", ["numpy", "jax", "torch", "mlx", "c"])
def test_trees(backend):
    proto, table, leaves = trees()
    x = np.asarray(np.meshgrid([-1, 0, 1, np.nan], [0, 1, np.nan], [-2, 0, 1, np.nan]), np.float32).reshape(3, -1).T
    compiled = ml.compile(ml.from_onnx(proto), backend, inference=True)
    result = compiled.backend.to_numpy(compiled({"x": x})["y"])
    np.testing.assert_array_equal(result, [walk(row, table, leaves) for row in x])


def test_the_page_about_onnx():
    """Run the blocks of docs/onnx.md in order."""
    page = (Path(__file__).parents[1] / "docs" / "onnx.md").read_text()
    names = {}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(compile(block, "docs/onnx.md", "exec"), names)
