"""GGUF files on other backends than GGML: compiled with all options, 4-bit codes recovered."""

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


@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "q4_k", "q6_k", "mxfp4", "iq4_nl"])
def test_matrices_of_a_file_are_multiplied_unchanged(kind, backend, tmp_path):
    """Compare with the decoded weights, and on C count the bytes that the program holds."""
    pytest.importorskip("mithril_hub")
    model = ml.Model()
    model += Linear(96, name="first")
    model += Linear(64, name="second")
    source = ml.compile(model, "ggml", shapes={"input": [None, 256]}, inference=True)
    params = source.randomize_params(0)
    params["second.weight"] = np.random.default_rng(1).standard_normal((64, 96)).astype(np.float32)
    path = tmp_path / "model.gguf"
    source.export(path, params=params, quantize={"first.*": kind, "*": None})
    weights = ml.open_weights(path)
    assert str(weights["first.weight"]) == f"<{kind} [96, 256], {weights['first.weight'].codes.nbytes} bytes>"
    x = np.random.default_rng(2).standard_normal((2, 256)).astype(np.float32)
    first, second = (np.asarray(weights[f"{n}.weight"], np.float64) for n in ("first", "second"))
    expected = (x @ first.T + weights["first.bias"]) @ second.T + weights["second.bias"]
    for static in (True, False):
        compiled = ml.compile(model, backend, shapes={"input": [2, 256]}, static_inference=static, inference=True)
        compiled.bind(weights)
        result = compiled.backend.to_numpy(compiled({"input": x})["output"])
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
        if backend == "c" and static:
            constants = compiled.programs[-1].executable.layout.constants.values()
            rest = sum(x.nbytes for n, x in weights.items() if n != "first.weight")
            limit = weights["first.weight"].nbytes * (1.35 if kind == "q6_k" else 1.1)  # whole bytes for six bits
            assert sum(x.nbytes for x in constants) - rest < limit + 256


@pytest.mark.parametrize("name", ["numpy", "c"])
def test_codes_of_a_file_are_recovered(file, name):
    """Multiply 4-bit codes whose numbers equal those of the file: nothing is quantized again."""
    setting = {"weights": "int4", "group": 32}
    shapes = {"input": [3, 64]}
    coded = ml.load(file, backend=name, static_inference=True, quantization=setting, shapes=shapes)
    expected = ml.load(file, backend="numpy")(X)["output"]
    np.testing.assert_allclose(np.asarray(coded(X)["output"]), np.asarray(expected), rtol=1e-5, atol=1e-5)
    assert "2 weights are int4 in groups of 32" in str(coded.decisions)
