"""Values that are compared with their own elements: ``torch.compile`` computes them once, so that maxima are found."""

import numpy as np
import pytest

import mithril as ml
from mithril import ops
from mithril.graph import Builder, Graph

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of inductor's imports


def maxima() -> Graph:
    """Return maxima of a value that is cheap to compute again, for which functions of vectors and elements differ."""
    with Builder() as b:
        v = b.input("x", (33, 3)) + b.param("w", (33, 3)) * 0.5
        v = v * v * 1.01 + v * 0.33 + ops.sin(v) * 0.7
        return b.build({"y": ops.max(v, axis=1), "z": v * 1.5})


def gradients(backend: str, **options: object) -> np.ndarray:
    rng = np.random.default_rng(3)
    x, w, slope = (rng.standard_normal(shape).astype(np.float32) for shape in ((33, 3), (33, 3), (33,)))
    compiled = ml.compile(maxima(), backend, **options)
    array = compiled.backend.array
    slopes = {"y": array(slope), "z": array(np.zeros((33, 3), np.float32))}
    _, result = compiled.evaluate({"w": array(w)}, {"x": array(x)}, slopes)
    return compiled.backend.to_numpy(result["w"])


def test_gradients_of_maxima_in_compiled_programs() -> None:
    expected = gradients("torch")
    for options in ({"jit": True}, {"torch_dynamo": True, "autodiff": "native"}):
        np.testing.assert_allclose(gradients("torch", **options), expected, rtol=1e-4, atol=1e-5)


def test_only_compared_values_are_stored() -> None:
    compiled = ml.compile(maxima(), "torch", jit=True)
    array = compiled.backend.array
    x = {"x": array(np.ones((33, 3), np.float32))}
    params = {"w": array(np.ones((33, 3), np.float32))}
    compiled.evaluate(params, x)
    assert "stored(" not in compiled.source  # max alone compares nothing
    compiled.evaluate(params, x, {"y": array(np.ones(33, np.float32)), "z": array(np.ones((33, 3), np.float32))})
    assert compiled.source.count("= stored(") == 1
