"""``semantics="native"``: libraries' own meanings, recorded; with ordinary values they agree with the portable ones."""

from __future__ import annotations

import numpy as np
import pytest

import mithril as ml
from mithril import ops, plugins
from mithril.backend.base import BuildOptions
from mithril.models import Layer
from mithril_testing import BackendConformance

NAMES = [n for n in ("jax", "torch", "mlx") if n in plugins.backends()]
OPS = ("argmax", "argsort", "attention", "cast", "floordiv", "matmul", "mod", "pow", "sign", "sort", "take")


def kit(name):
    class Kit(BackendConformance):
        backend = name

        @classmethod
        def options(cls):
            return BuildOptions(jit=False, semantics="native")

    return Kit()


def ordinary():
    from mithril_testing.cases import backend_cases

    dtypes = set.intersection(*(set(plugins.backend_class(n).dtypes) for n in NAMES)) if NAMES else set()
    of_both = ("cast[1]", "mod[int]", "pow[int]")  # samples with divisors of 0 and the like among ordinary ones
    unusual = (
        *of_both,
        "special",
        "outside",
        "clamp",
        "negative",
        "zero",
        "blind",
        "causal mask",
        "nothing",
        "saturat",
        "nan",
        "wrap",
    )
    for case in backend_cases(dtypes, OPS):
        if case.dtype is None and not any(word in case.id for word in unusual):
            yield case


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", list(ordinary()), ids=lambda c: c.id)
def test_ordinary_values_agree(name, case):
    kit(name).compare(case.graph(), case.inputs(), 4 * case.op.tolerance)


@pytest.mark.parametrize("name", NAMES)
def test_differences_are_recorded(name):
    import mithril as ml
    from mithril.models import Embedding, Model

    model = Model()
    model += Embedding(10, 4)
    options = {"shapes": {"input": [3]}, "types": {"input": "int32"}}
    portable = ml.compile(model, name, **options)
    native = ml.compile(model, name, semantics="native", **options)
    assert not portable.decisions.of("choice")
    assert "'take' " in str(native.decisions)
    assert portable.source != native.source
    params, tokens = native.randomize_params(0), np.array([3, 0, 9], np.int32)
    left, right = (next(iter(c.evaluate(params, {"input": tokens}).values())) for c in (portable, native))
    np.testing.assert_array_equal(np.asarray(left), np.asarray(right))


class Stopped(Layer):
    def build(self, x):
        w = self.param("weight", (x.shape[-1], 4), "normal")
        y = x @ (w * ops.stop_gradient(ops.max(ops.abs(w))))
        return y + ops.stop_gradient(ops.round(y) - y)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_the_framework_end_where_those_of_the_graph_do(name):
    x, slope = np.linspace(-1, 1, 24, dtype=np.float32).reshape(3, 8), np.ones((3, 4), np.float32)
    reference = ml.compile(Stopped(), "numpy", shapes={"input": [3, 8]})
    params = reference.randomize_params(seed=0)
    _, expected = reference.evaluate(params, {"input": x}, slope)
    compiled = ml.compile(Stopped(), name, shapes={"input": [3, 8]}, autodiff="native")
    array = compiled.backend.array
    _, gradients = compiled.evaluate({n: array(p) for n, p in params.items()}, {"input": array(x)}, array(slope))
    np.testing.assert_allclose(compiled.backend.to_numpy(gradients["weight"]), expected["weight"], rtol=1e-5)


# docs/semantics.md states these slopes at 0, where those of the graph are 0, 0, 0.5 and 0.
SLOPES = {"jax": (0.5, 1.0, 0.0, 0.5), "torch": (0.0, 0.0, 0.5, 1.0), "mlx": (0.0, 0.0, 0.0, 0.0)}


@pytest.mark.parametrize("name", NAMES)
def test_kinks_of_frameworks_are_those_that_the_page_states(name):
    zero, one = np.zeros(1, np.float32), np.ones(1, np.float32)
    for function, slope in zip((ops.relu, ops.abs, ops.softplus, ops.relu6), SLOPES[name], strict=True):
        layer = type("Kink", (Layer,), {"build": lambda self, x, function=function: function(x)})()
        compiled = ml.compile(layer, name, shapes={"input": [1]}, autodiff="native")
        array, to_numpy = compiled.backend.array, compiled.backend.to_numpy
        _, gradients = compiled.evaluate({}, {"input": array(zero)}, array(one), wrt=["input"])
        assert to_numpy(gradients["input"]).item() == slope, function
