"""``static_inference=True``: bound parameters become part of the program."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import mithril as ml
from mithril.models import (
    BatchNorm1d,
    BatchNorm2d,
    Conv1d,
    Conv2d,
    Flatten,
    LayerNorm,
    Linear,
    Model,
    Relu,
    Softmax,
    Tanh,
    TransformerEncoderLayer,
)

X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(4, 6)


def net(size=8):
    model = Model()
    model |= Linear(size, name="first")(input="x", output="h")
    model |= BatchNorm1d(size, name="norm")(input="h", output="n")
    model |= Relu(name="act")(input="n", output="a")
    model |= Linear(2, name="last")(input="a", output="output")
    return model


def number(compiled, results):
    return compiled.backend.to_numpy(results["output"])


def test_bound_parameters_are_baked_in(backend):
    compiled = ml.compile(net(), backend, shapes={"x": [4, 6]}, static_inference=True)
    params = compiled.randomize_params(0)
    free = number(compiled, compiled.evaluate(params, {"x": X}))
    compiled.bind(params)
    baked = number(compiled, compiled({"x": X}))
    np.testing.assert_allclose(baked, free, rtol=1e-5, atol=1e-6)
    program = compiled.programs[-1]
    assert not program.interface.params
    assert not program.graph.with_role("param")


def test_nothing_is_compiled_before_the_parameters_are_bound(backend, monkeypatch):
    cls = ml.plugins.backend_class(backend)
    built, build = [], cls.build
    monkeypatch.setattr(cls, "build", lambda self, *arguments: built.append(1) or build(self, *arguments))
    compiled = ml.compile(net(), backend, shapes={"x": [4, 6]}, static_inference=True)
    assert not built
    compiled.bind(compiled.randomize_params(0))({"x": X})
    assert len(built) == 1


def test_weights_are_released_by_backends_of_numpy_arrays(backend):
    compiled = ml.compile(net(), backend, shapes={"x": [4, 6]}, static_inference=True)
    params = compiled.randomize_params(0)
    expected = number(compiled, compiled.bind(params)({"x": X})).copy()
    if not compiled.backend.is_array(X):
        with pytest.raises(ml.InputError, match="are not NumPy's"):
            compiled.bind(params, release=True)
        return
    with pytest.raises(ml.InputError, match="expected \\[8\\]"):
        compiled.bind({**params, "first.bias": params["last.bias"]}, release=True)
    mapping = dict(params)
    compiled.bind(mapping, release=True)
    assert not mapping
    np.testing.assert_array_equal(number(compiled, compiled({"x": X})), expected)
    with pytest.raises(ml.InputError, match="calls read the parameters themselves"):
        ml.compile(net(), backend, shapes={"x": [4, 6]}, inference=True).bind(params, release=True)
    with pytest.raises(ml.InputError, match="calls read the parameters themselves"):
        unsized = ml.compile(Model(Flatten(), Linear(3)), backend, inference=True)  # sizes of the first call
        unsized.bind({"linear.weight": np.ones((3, 6), np.float32)}, release=True)


def test_binding_again_makes_another_program(backend):
    compiled = ml.compile(net(), backend, shapes={"x": [4, 6]}, static_inference=True)
    first, second = compiled.randomize_params(0), compiled.randomize_params(1)
    a = number(compiled, compiled.bind(first)({"x": X}))
    b = number(compiled, compiled.bind(second)({"x": X}))
    assert not np.allclose(a, b)
    np.testing.assert_allclose(b, number(compiled, compiled.evaluate(second, {"x": X})), rtol=1e-5, atol=1e-6)
    assert len([p for p in compiled.programs if p.request.binding]) == 1  # the old one is gone


@pytest.mark.parametrize("shapes", [{"x": [4, 6]}, None], ids=["known sizes", "sizes of the first call"])
def test_inspection_after_binding_shows_the_program_of_these_parameters(backend, shapes):
    """Look at the program without a call in between, as ``export`` does."""
    compiled = ml.compile(net(), backend, static_inference=True, **({} if shapes is None else {"shapes": shapes}))
    params = compiled.randomize_params(0, inputs={"x": X})
    for k in (1, 2):
        compiled.bind({n: np.full_like(compiled.backend.to_numpy(a), 7.25 * k) for n, a in params.items()})
        if shapes is None and k == 1:
            compiled({"x": X})
        embedded = {i.name: i.data for i in compiled.graph.with_role("constant")}
        np.testing.assert_array_equal(embedded["last.bias"], 7.25 * k)
        assert not compiled.graph.with_role("param")


def test_exported_c_has_the_parameters_of_the_latest_binding(tmp_path):
    pytest.importorskip("mithril_cbackend")
    compiled = ml.compile(net(), "c", shapes={"x": [4, 6]}, static_inference=True)
    params = compiled.randomize_params(0)
    for k in (1, 2):
        compiled.bind({n: np.full_like(np.asarray(a), 7.25 * k) for n, a in params.items()})
        compiled.export(tmp_path / str(k), embed=False)
        stored = np.fromfile(tmp_path / str(k) / "model.weights", np.float32)
        assert np.count_nonzero(stored == 7.25 * k) > 16 and not np.any(stored == 7.25 * (3 - k))


def test_large_parameters_are_stored_next_to_the_source(tmp_path):
    model = Model()
    model |= Linear(300, name="l")(input="x", output="output")
    path = tmp_path / "net.py"
    compiled = ml.compile(
        model,
        "numpy",
        shapes={"x": [4, 200]},
        static_inference=True,
        file_path=str(path),
        cache=True,
        cache_dir=str(tmp_path / "c"),
    )
    x = np.random.default_rng(0).standard_normal((4, 200)).astype(np.float32)
    compiled.bind(compiled.randomize_params(0))
    expected = compiled({"x": x})["output"]
    assert len(compiled.source) < 4000
    assert path.with_suffix(".npz").exists()
    import importlib.util

    spec = importlib.util.spec_from_file_location("baked_net", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    np.testing.assert_array_equal(module.forward({}, {"x": x})["output"], expected)
    again = ml.compile(
        model, "numpy", shapes={"x": [4, 200]}, static_inference=True, cache=True, cache_dir=str(tmp_path / "c")
    )
    np.testing.assert_array_equal(again.bind(again.randomize_params(0))({"x": x})["output"], expected)


def test_expressions_of_parameters_and_state_are_computed_once():
    compiled = ml.compile(net(), "numpy", shapes={"x": [4, 6]}, static_inference=True, outputs=["n"])
    params = compiled.randomize_params(0)
    state = {n: np.full(np.shape(a), 0.7, np.float32) for n, a in compiled.initial_state().items()}
    expected = compiled.evaluate(params, {"x": X}, state=state)[0]["n"]
    np.testing.assert_allclose(compiled.bind(params, state)({"x": X})["n"], expected, rtol=1e-5)
    graph = compiled.programs[-1].graph
    assert [n.op.name for n in graph.nodes if n.op.name != "constant"] == ["linear"]  # batch norm is in its weights
    assert not graph.with_role("param", "state")


def test_wrong_shapes_are_refused_when_bound(backend):
    compiled = ml.compile(net(), backend, shapes={"x": [4, 6]}, static_inference=True)
    params = compiled.randomize_params(0)
    with pytest.raises(ml.InputError, match="parameter 'last.weight' has shape"):
        compiled.bind({**params, "last.weight": params["first.weight"]})


def stacked(*layers):
    model = Model()
    for layer in layers:
        model += layer
    return model


MODELS = {
    "convolution with bias": (lambda: stacked(Conv2d(3, 4, 3), BatchNorm2d(4), Relu(), Conv2d(4, 2, 3)), [2, 3, 9, 9]),
    "without bias": (lambda: stacked(Conv2d(3, 4, 3, bias=False), BatchNorm2d(4), Relu()), [2, 3, 8, 8]),
    "one dimension": (lambda: stacked(Conv1d(3, 4, 3), BatchNorm1d(4), Tanh()), [2, 3, 16]),
    "linear": (lambda: stacked(Linear(8), BatchNorm1d(8), Relu(), Linear(2)), [64, 6]),
    "norm first": (lambda: stacked(BatchNorm1d(6), Linear(8), Relu()), [64, 6]),
    "encoder": (lambda: stacked(TransformerEncoderLayer(8, 2), Linear(2)), [2, 5, 8]),
    "embedding": (lambda: stacked(Linear(8), LayerNorm(8), Softmax()), [3, 6]),
}


def reading(graph):
    """Return the nodes that depend on an input."""
    values = {i.value for i in graph.with_role("input")}
    nodes = []
    for node in graph.nodes:
        if any(v in values for v in node.operands):
            nodes.append(node)
            values.update(node.results)
    return nodes


@pytest.mark.parametrize("level", ["low", "medium", "high"])
@pytest.mark.parametrize("name", MODELS)
def test_static_inference_folds_at_least_as_much_as_inference(name, level, tmp_path):
    make, shape = MODELS[name]
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    counts, results = [], []
    for option in ("inference", "static_inference"):
        compiled = ml.compile(
            make(), "numpy", shapes={"input": shape}, optimization_level=level, cache_dir=tmp_path, **{option: True}
        )
        compiled.bind(compiled.randomize_params(seed=0))
        results.append(compiled({"input": x})["output"])
        counts.append(Counter(node.op.name for node in reading(compiled.programs[-1].executable.graph)))
    assert not counts[1] - counts[0], "operations that only the static program has"
    np.testing.assert_allclose(results[1], results[0], rtol=1e-4, atol=1e-5)
