"""GGUF files on other backends than GGML: compiled with all options, 4-bit quantized values recovered."""

from __future__ import annotations

import numpy as np
import pytest

import mithril as ml
from mithril.models import Linear, Relu

pytest.importorskip("mithril_ggml")
X = {"input": np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)}


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """Return a file whose weights are q4_0, and the results of its numbers."""
    model = ml.Model()
    model += Linear(64, name="first")
    model += Relu()
    model += Linear(32, name="second")
    compiled = ml.compile(model, "ggml", shapes={"input": [None, 64]}, inference=True)
    path = tmp_path_factory.mktemp("files") / "model.gguf"
    compiled.export(path, params=compiled.randomize_params(0), quantize="q4_0")
    return path


def test_static_programs_of_a_file(file, backend):
    """Embed the weights of the file, unpacked."""
    if backend == "ggml":
        for name, value in (("static_inference", True), ("quantization", {"weights": "int4"})):
            with pytest.raises(ml.OptionError, match=f"{name}=.* changes weights"):
                ml.load(file, **{name: value})
        return
    expected = ml.load(file, backend=backend)
    embedded = ml.load(file, backend=backend, static_inference=True, shapes={"input": [3, 64]})
    results = [compiled.backend.to_numpy(compiled(X)["output"]) for compiled in (expected, embedded)]
    np.testing.assert_allclose(results[1], results[0], rtol=1e-5, atol=1e-6)
    assert not embedded.graph.with_role("param")


KINDS = ["q8_0", "q4_0", "q4_k", "q6_k", "mxfp4", "iq4_nl"]


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Return the weights of a file with a layer of each kind, a constructor of its model, and the results for X."""
    pytest.importorskip("mithril_hub")

    def build():
        model = ml.Model()
        for kind in KINDS:
            model += Linear(256, name=kind)
        return model

    source = ml.compile(build(), "ggml", shapes={"input": [3, 256]}, inference=True)
    path = tmp_path_factory.mktemp("files") / "model.gguf"
    source.export(path, params=source.randomize_params(0), quantize={f"{kind}.weight": kind for kind in KINDS})
    weights = ml.open_weights(path)
    x = np.tile(X["input"], 4)
    result = x.astype(np.float64)
    for kind in KINDS:
        result = result @ np.asarray(weights[f"{kind}.weight"], np.float64).T + weights[f"{kind}.bias"]
    return weights, build, {"input": x}, result


@pytest.mark.parametrize("is_static", [True, False])
def test_matrices_of_a_file_are_multiplied_unchanged(stored, is_static, backend):
    """Compare with the decoded weights, and on C count the bytes that the program holds."""
    weights, build, inputs, expected = stored
    model, options = build(), {"shapes": {"input": [3, 256]}, "inference": True, "static_inference": is_static}
    if is_static:
        model.pretrained = weights
    compiled = ml.compile(model, backend, **options)
    if not is_static:
        compiled.bind(weights)
    result = compiled.backend.to_numpy(compiled(inputs)["output"])
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
    if backend == "c" and is_static:
        constants = compiled.programs[-1].executable.layout.constants.values()
        limit = sum(x.nbytes * (1.35 if "q6_k" in n else 1.1) for n, x in weights.items())  # whole bytes for six bits
        assert sum(x.nbytes for x in constants) < limit + 1024


@pytest.fixture
def embedded(stored, backend):
    """Return a static model of the file."""
    model = stored[1]()
    model.pretrained = stored[0]
    return ml.compile(model, backend, shapes={"input": [3, 256]}, inference=True, static_inference=True)


def test_bound_matrices_of_a_file_are_saved(stored, embedded, tmp_path):
    """Write the numbers of all weights: only a backend that reads quantized values has them in ``params``."""
    embedded.save(tmp_path / "w.safetensors")
    saved = ml.open_weights(tmp_path / "w.safetensors")
    assert saved.keys() == stored[0].keys()
    for name, weight in stored[0].items():
        np.testing.assert_array_equal(saved[name], np.asarray(weight), err_msg=name)
        is_bound = embedded.backend.is_array(embedded.params[name])
        assert is_bound is (embedded.backend.name != "c" or name.endswith("bias"))


@pytest.mark.parametrize("name", ["numpy", "c"])
def test_quantized_values_of_a_file_survive_later_bindings(name, stored):
    """Load one tensor, load none, and release: matrices that are read quantized remain so."""
    weights, build, inputs, expected = stored
    options = {"shapes": {"input": [3, 256]}, "inference": True, "static_inference": True}
    compiled = ml.compile(build(), name, **options).bind(weights)
    kind = type(compiled.params["q8_0.weight"])
    compiled.load_state_dict({"q4_0.bias": weights["q4_0.bias"]}, strict=False)
    compiled.load_state_dict({"q4_0.weight": weights["q4_0.weight"]}, strict=False)
    assert {type(compiled.params[f"{k}.weight"]) for k in KINDS} == {kind}
    owned = dict(weights)
    compiled.bind(owned, release=True)
    assert not owned
    assert {type(compiled.params[f"{k}.weight"]) for k in KINDS} == {kind}
    assert (kind is np.ndarray) == (name == "numpy")
    result = np.asarray(compiled(inputs)["output"])
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


def test_products_without_quantized_values_are_reported(stored, backend):
    """Record every layer in which ``stored`` has no effect: of arrays, and on backends that read float32."""
    weights, build = stored[:2]
    options = {"shapes": {"input": [3, 256]}, "inference": True, "static_inference": True}
    decoded = {n: np.asarray(w) for n, w in weights.items()}
    if backend == "ggml":
        pytest.skip("GGML has a quantization of its own")
    for arrays, name in ((weights, backend), (decoded, "c")):
        compiled = ml.compile(build(), name, quantization={"weights": "stored"}, **options).bind(arrays)
        assert compiled.programs
        messages = [d.message for d in compiled.decisions.of("downgrade") if "stays float32" in d.message]
        layers = [] if arrays is weights and name == "c" else KINDS
        assert messages == [
            f"'{k}' stays float32: its weights are no quantized values of a file that backend '{name}' reads"
            for k in layers
        ]


def test_parameters_are_drawn_without_a_program(backend):
    """Compile only the program that embeds the bound parameters."""
    options = {"shapes": {"input": [3, 64]}, "inference": True, "static_inference": True}
    compiled = ml.compile(Linear(8), backend, **options)
    compiled.bind(compiled.randomize_params())
    assert [p.request.binding for p in compiled.programs] == [1]


def test_matrices_of_a_file_name_their_format(stored):
    assert str(stored[0]["q4_k.weight"]) == f"<q4_k [256, 256], {256 * 144} bytes>"


@pytest.mark.parametrize("name", ["numpy", "c"])
def test_quantized_values_of_a_file_are_recovered(file, name):
    """Multiply 4-bit quantized values whose numbers equal those of the file: nothing is quantized again."""
    setting = {"weights": "int4", "group": 32}
    shapes = {"input": [3, 64]}
    coded = ml.load(file, backend=name, static_inference=True, quantization=setting, shapes=shapes)
    expected = ml.load(file, backend="numpy")(X)["output"]
    np.testing.assert_allclose(np.asarray(coded(X)["output"]), np.asarray(expected), rtol=1e-5, atol=1e-5)
    assert "2 weights are int4 in groups of 32" in str(coded.decisions)
