"""The models in examples/: parameters as their families have them, both modes, unknown sizes, cost of building."""

import importlib.util
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from mithril.compiler.initializers import initialize
from mithril.graph import verify
from mithril.graph.dims import Dim, TensorType
from mithril.graph.dtypes import dtype
from mithril.graph.evaluation import evaluate
from mithril.models import Linear, Model, Relu
from mithril.models.language.flatten import flatten
from mithril.models.language.trace import trace_model

EXAMPLES = Path(__file__).parents[3] / "examples"
spec = importlib.util.spec_from_file_location("model_test_helpers", Path(__file__).with_name("helpers.py"))
helpers = importlib.util.module_from_spec(spec)
spec.loader.exec_module(helpers)
run, graph_of, f32 = helpers.run, helpers.graph_of, helpers.f32


def example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(EXAMPLES))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(EXAMPLES))
        sys.modules.pop("everywhere", None)
    return module


def value(kind, *shape):
    return TensorType(dtype(kind), shape)


B, L = Dim("B", 1, 8), Dim("L", 1, 16)
SMALL = {
    "resnet18": (lambda m: m.resnet18(10, 8), {"input": value("float32", B, 3, 32, 32)}),
    "gpt": (lambda m: m.gpt(50, 16, 2, 2, 8, dropout=0.1), {"input": value("int32", B, L)}),
    "bert": (
        lambda m: m.bert(50, 16, 2, 2, 8),
        {"tokens": value("int32", B, L), "segments": value("int32", B, L), "mask": value("bool", B, L)},
    ),
    "unet": (lambda m: m.unet(width=4, depth=2), {"input": value("float32", B, 3, 16, 16)}),
    "lstm_lm": (lambda m: m.lstm_lm(50, 8), {"input": value("int32", B, L)}),
    "vit": (lambda m: m.vit(16, 8, 10, 2, 2, 8, dropout=0.1), {"input": value("float32", B, 3, 16, 16)}),
}


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("training", [False, True])
def test_every_example_runs_for_sizes_that_were_unknown(name, training):
    make, types = SMALL[name]
    graph = verify(trace_model(flatten(make(example(name))), types, training=training))
    start = initialize(graph.with_role("param", "state"), 0)
    rng = np.random.default_rng(0)
    sizes = {"B": 2, "L": 5}
    inputs = {}
    for n, t in types.items():
        shape = [sizes.get(str(d), d) for d in t.shape]
        inputs[n] = (rng.standard_normal(shape) if t.dtype.is_float else rng.integers(0, 2, shape)).astype(
            t.dtype.numpy
        )
    out = evaluate(graph, {**start, **inputs})
    assert all(np.isfinite(a).all() for a in out.values() if a.dtype.kind == "f")
    assert any(n.startswith("state/") for n in out) == (training and bool(graph.with_role("state")))


def test_resnet18_has_the_parameters_of_its_family():
    graph = graph_of(example("resnet18").resnet18(), {"input": f32(1, 3, 32, 32)})
    params = {i.name: i.type.shape for i in graph.with_role("param")}
    assert sum(int(np.prod(s)) for s in params.values()) == 11_689_512
    assert len(params) == 62
    assert params["layer2.0.downsample.0.weight"] == (128, 64, 1, 1)
    assert params["fc.weight"] == (1000, 512)
    assert len(graph.with_role("state")) == 40


def test_gpt_token_by_token_equals_the_full_sequence():
    gpt = example("gpt").gpt
    tokens = np.random.default_rng(0).integers(0, 50, (2, 6)).astype(np.int32)
    full, params = run(gpt(50, 16, 2, 2, 8), {"input": tokens})
    cached, parts, state = gpt(50, 16, 2, 2, 8, cache=True), [], {}
    for start, stop in ((0, 3), (3, 4), (4, 6)):
        inputs = {"input": tokens[:, start:stop], "position": np.int32(start)}
        graph = graph_of(cached, inputs)
        state = state or initialize(graph.with_role("state"), 0)
        out = evaluate(graph, {**params, **state, **inputs})
        parts.append(out["output"])
        state = {n: out[f"state/{n}"] for n in state}
    np.testing.assert_allclose(np.concatenate(parts, 1), full["output"], atol=1e-6)
    assert "wte.weight" in params
    assert not any(n.startswith("lm_head") for n in params)


def cost(make, types):
    best = float("inf")
    for _ in range(3):
        start = time.process_time()
        graph = trace_model(flatten(make()), types)
        best = min(best, time.process_time() - start)
    return best, graph


def test_building_is_cheap():
    def deep():
        model = Model()
        for _ in range(200):
            model += Linear(64)
            model += Relu()
        return model

    seconds, graph = cost(deep, {"input": value("float32", 8, 64)})
    assert len(graph.nodes) == 400
    assert seconds < 0.3
    gpt = example("gpt").gpt
    seconds, graph = cost(lambda: gpt(layers=48), {"input": value("int32", 1, 128)})
    assert len(graph.with_role("param")) == 2 + 48 * 16 + 2
    assert seconds < 2
