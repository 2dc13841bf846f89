"""A third party's operations and lowerings on every backend: they run, are named, and are checked."""

from __future__ import annotations

import importlib
import sys
import textwrap

import numpy as np
import pytest

import mithril as ml
from mithril import ops, plugins
from mithril.graph.errors import GradientError, PluginError, StrictError, UnsupportedError
from mithril.models import Model

BACKENDS = ["numpy", "jax", "torch", "mlx", "c", "ggml"]

OPS = '''
from __future__ import annotations

import numpy as np

import mithril as ml
from mithril.graph import Axis, broadcast, floating
from mithril.ops import cos, div, where


@ml.op(shape=broadcast, dtype=floating, promotes="float")
def acme_sinc(x):
    """sin(x) / x; 1 at 0."""
    return np.sinc(x / np.pi)


@acme_sinc.vjp
def _(g, y, x):
    safe = where(x == 0.0, 1.0, x)
    return (g * where(x == 0.0, 0.0, div(cos(safe) - y, safe)),)


@ml.op(shape=lambda x, *, axis: (x, x), dtype=lambda kinds, attributes: kinds[0], results=("low", "high"))
def acme_bounds(x, *, axis: Axis = -1):
    """Running minimum and maximum along an axis."""
    if axis < 0:
        raise AssertionError("a negative axis arrived")
    return np.minimum.accumulate(x, axis), np.maximum.accumulate(x, axis)


acme_bounds.no_vjp("piecewise constant")


@ml.op(shape=lambda x: x, dtype=lambda kinds, attributes: kinds[0])
def acme_bad(x):
    """Fails."""
    raise ZeroDivisionError("own")


acme_bad.no_vjp("none")


@ml.op(shape=lambda x: x, dtype=lambda kinds, attributes: kinds[0])
def acme_liar(x):
    """Returns another shape than its rule says."""
    return np.zeros((7, 7), x.dtype)


acme_liar.no_vjp("none")
'''

PLUGIN = """
from mithril import Lowering, OpsSpec, hookimpl


@hookimpl
def mithril_ops():
    return [OpsSpec("acme_ops", ("acme_sinc", "acme_bounds", "acme_bad", "acme_liar"))]


@hookimpl
def mithril_lowerings(backend):
    try:
        from acme_lowerings import LOWERINGS
    except ImportError:
        return []
    return [Lowering(*row) for row in LOWERINGS.get(backend, [])]
"""


@pytest.fixture
def acme(tmp_path, monkeypatch):
    """Install a distribution ``acme-ops 1.5``; call it with the text of its module of lowerings."""
    before = set(sys.modules)
    registry = importlib.import_module("mithril.graph.registry")
    registered = dict(registry._operations)

    def install(lowerings: str = "LOWERINGS = {}") -> None:
        for name, text in {"acme_ops": OPS, "acme_plugin": PLUGIN, "acme_lowerings": lowerings}.items():
            (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
        info = tmp_path / "acme_ops-1.5.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-ops\nVersion: 1.5\n")
        (info / "entry_points.txt").write_text("[mithril]\nacme = acme_plugin\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        importlib.invalidate_caches()
        plugins.reload()

    yield install
    for name in set(sys.modules) - before:
        if name.startswith("acme_"):
            del sys.modules[name]
    registry._operations.clear()
    registry._operations.update(registered)
    monkeypatch.undo()
    plugins.reload()


def compiled(backend, function, shape=(2, 3), dtype="float32", **options):
    x = ml.IOKey("x", dtype=dtype)
    model = Model.create(inputs=x, y=function(x))
    return ml.compile(model, backend, shapes={"x": list(shape)}, trainable=["x"], **options)


def run(backend, function, x, **options):
    program = compiled(backend, function, x.shape, str(x.dtype), **options)
    values = program.evaluate({}, {"x": program.backend.array(x)})
    return program, program.backend.to_numpy(values["y"])


X = np.linspace(-4, 4, 12, dtype=np.float32).reshape(3, 4)


# ---------------------------------------------------------------------------------------------- from the declaration
@pytest.mark.parametrize("backend", BACKENDS)
def test_primitive_runs_from_its_declaration(acme, backend):
    acme()
    program, y = run(backend, lambda x: ops.exp(ops.acme_sinc(x * 2.0)), X)
    np.testing.assert_allclose(y, np.exp(np.sinc(2 * X / np.pi)), rtol=1e-5)
    (fallback,) = program.decisions.of("fallback")
    assert fallback.message == f"'acme_sinc' on {backend}: no lowering, so its NumPy reference runs"


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradient_of_a_fallback_is_that_of_its_vjp(acme, backend):
    acme()
    program = compiled(backend, lambda x: ops.acme_sinc(x), X.shape)
    g = np.ones_like(X)
    _, gradients = program.evaluate({}, {"x": program.backend.array(X)}, {"y": program.backend.array(g)})
    eps = 1e-3
    expected = (np.sinc((X.astype("f8") + eps) / np.pi) - np.sinc((X.astype("f8") - eps) / np.pi)) / (2 * eps)
    np.testing.assert_allclose(program.backend.to_numpy(gradients["x"]), expected, atol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_fallback_with_two_results_and_an_axis(acme, backend):
    acme()
    _, y = run(backend, lambda x: ops.sub(*reversed(ops.acme_bounds(x, axis=-2))), X[::-1].copy())
    x = X[::-1]
    np.testing.assert_allclose(y, np.maximum.accumulate(x, 0) - np.minimum.accumulate(x, 0), rtol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_fallback_keeps_the_dtype(acme, backend, dtype):
    if (backend, dtype) == ("mlx", "float64"):
        pytest.skip("MLX has no float64")
    acme()
    x = ml.dtype(dtype).numpy
    _, y = run(backend, ops.acme_sinc, X.astype(x))
    assert y.dtype == x
    np.testing.assert_allclose(y.astype("f8"), np.sinc(X.astype("f8") / np.pi), atol=3e-2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_fallback_is_an_error_under_strict(acme, backend):
    acme()
    with pytest.raises(StrictError, match=f"'acme_sinc' on {backend}"):
        compiled(backend, ops.acme_sinc, strict=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_fallback_in_a_branch(acme, backend):
    acme()

    def body(x):
        return ops.cond(ops.sum(x) > 0.0, lambda z: ops.acme_sinc(z), lambda z: z * 3.0, x)

    from mithril.graph import Builder

    with Builder("branch") as b:
        x = b.input("x", (3, 4), "float32")
        y = body(x)
    graph = b.build({"y": y if not isinstance(y, (tuple, list)) else y[0]})
    instance = plugins.backend_class(backend)()
    from mithril.backend.base import BuildOptions

    options = BuildOptions()
    executable = instance.build(instance.decomposed(graph, options), options)
    for x in (X + 5, X - 5):
        value = instance.to_numpy(executable({}, {"x": instance.array(x)})["y"])
        np.testing.assert_allclose(value, np.sinc(x / np.pi) if x.sum() > 0 else 3 * x, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_failing_reference_names_operation_and_layer(acme, backend):
    acme()
    program = compiled(backend, ops.acme_bad)
    with pytest.raises(Exception, match="acme_bad") as caught:
        program.evaluate({}, {"x": program.backend.array(np.ones((2, 3), np.float32))})
    assert "ZeroDivisionError: own" in str(caught.value)


def test_reference_with_another_shape_than_its_rule(acme):
    acme()
    with pytest.raises(ml.OperationError, match="'acme_liar'") as caught:
        ops.acme_liar(np.ones((2, 3), np.float32))
    assert "[7, 7]" in str(caught.value)
    assert "[2, 3]" in str(caught.value)


@pytest.mark.parametrize("backend", ["jax", "torch", "mlx"])
def test_native_gradients_refuse_a_fallback(acme, backend):
    acme()
    program = compiled(backend, ops.acme_sinc, X.shape, autodiff="native")
    with pytest.raises(GradientError, match="'acme_sinc'"):
        program.evaluate({}, {"x": program.backend.array(X)}, {"y": program.backend.array(X)})


@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_fallback_is_not_compiled(acme, backend):
    acme()
    program, y = run(backend, ops.acme_sinc, X, jit=True)
    np.testing.assert_allclose(y, np.sinc(X / np.pi), rtol=1e-5)
    _, y = run(backend, ops.acme_sinc, X + 1, jit=True)
    np.testing.assert_allclose(y, np.sinc((X + 1) / np.pi), rtol=1e-5, atol=1e-6)
    assert "uncompiled" in str(program.decisions)


def test_fallback_of_a_large_array_on_jax(acme):
    acme()
    x = np.random.default_rng(0).normal(size=(1000, 1000)).astype(np.float32)
    _, y = run("jax", lambda x: ops.acme_sinc(ops.acme_sinc(x) * 2.0) + 1.0, x)
    np.testing.assert_allclose(y, np.sinc(2 * np.sinc(x / np.pi) / np.pi) + 1, rtol=1e-4)


def test_c_export_refuses_a_fallback(acme, tmp_path):
    acme()
    program, _ = run("c", ops.acme_sinc, X)
    with pytest.raises(UnsupportedError, match="'acme_sinc'"):
        program.export(tmp_path / "out", format="c")


@pytest.mark.parametrize("backend", BACKENDS)
def test_fallback_from_the_cache(acme, backend, tmp_path):
    acme()
    for _ in range(2):
        program, y = run(backend, ops.acme_sinc, X, cache=True, cache_dir=str(tmp_path / "cache"))
        np.testing.assert_allclose(y, np.sinc(X / np.pi), rtol=1e-5)
        assert "'acme_sinc' on" in str(program.decisions)


# --------------------------------------------------------------------------------------------------------- lowerings
KERNEL = """
def softmax(x, axis):
    import {module} as lib
    e = lib.exp(x)
    return e / e.sum({axis})

LOWERINGS = {{"{backend}": [("softmax", "acme_lowerings:softmax")]}}
"""
MODULES = {"numpy": "numpy", "jax": "jax.numpy", "torch": "torch", "mlx": "mlx.core", "c": "numpy", "ggml": "numpy"}


def kernel(backend):
    axis = "axis, keepdim=True" if backend == "torch" else "axis, keepdims=True"
    return KERNEL.format(module=MODULES[backend], axis=axis, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_kernel_on_arrays(acme, backend):
    acme(kernel(backend))
    program, y = run(backend, lambda x: ops.softmax(x, axis=-1) * 2.0, X)
    e = np.exp(X)
    np.testing.assert_allclose(y, 2 * e / e.sum(-1, keepdims=True), rtol=1e-5)
    assert f"'softmax' on {backend}: lowering by acme-ops 1.5" in str(program.decisions)
    if backend not in ("c", "ggml"):
        assert "lowering of 'softmax' by acme-ops 1.5" in program.source
    assert f"'softmax' on {backend}: lowering by acme-ops 1.5" in program.explain()


WRONG = """
def dtype(x, axis):
    import {module} as lib
    return {half}

def shape(x, axis):
    return x.reshape((-1,))

def fails(x, axis):
    raise ValueError("own")

def none(x, axis):
    return None

def surplus(x, axis, temperature):
    return x

NOT_CALLABLE = 3

LOWERINGS = {{"{backend}": [("softmax", "acme_lowerings:{which}")]}}
"""
HALF = dict.fromkeys(MODULES, "x.astype(lib.float16)") | {"torch": "x.to(lib.float16)"}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("which", "complaint"),
    [
        ("dtype", "returned float16[3, 4], expected float32[3, 4]"),
        ("shape", "returned float32[12], expected float32[3, 4]"),
        ("fails", "failed: ValueError: own"),
        ("none", "returned NoneType, expected an array"),
        ("surplus", "has the parameter 'temperature', which is neither an operand nor an attribute"),
        ("NOT_CALLABLE", "is not a function"),
        ("absent", "failed: AttributeError"),
    ],
)
def test_wrong_kernel_is_refused_by_name(acme, backend, which, complaint):
    acme(WRONG.format(module=MODULES[backend], half=HALF[backend], backend=backend, which=which))
    with pytest.raises(PluginError) as caught:
        run(backend, lambda x: ops.softmax(x, axis=-1), X)
    assert f"the lowering of 'softmax' on '{backend}' by acme-ops 1.5 {complaint}" in str(caught.value)


TEXT = """
def writer(call):
    return f"np.exp({call.x}) / np.exp({call.x}).sum({call.axis}, keepdims=True)"

def lines(call):
    call.line(f"{call.results[0]} = np.exp({call.x})")
    call.line(f"{call.results[0]} = {call.results[0]} / {call.results[0]}.sum({call.axis}, keepdims=True)")

def wrong(call):
    return call

def raises(call):
    raise ValueError("own")

def double(call):
    return f"{call.x}.astype(np.float64)"

TEMPLATE = "np.exp({x}) / np.exp({x}).sum({axis}, keepdims=True)"

LOWERINGS = {"numpy": [("softmax", "acme_lowerings:WHICH")]}
"""


@pytest.mark.parametrize("which", ["writer", "lines", "TEMPLATE"])
def test_lowering_that_writes_source(acme, which):
    acme(TEXT.replace("WHICH", which))
    program, y = run("numpy", lambda x: ops.softmax(x, axis=0), X)
    e = np.exp(X)
    np.testing.assert_allclose(y, e / e.sum(0, keepdims=True), rtol=1e-5)
    assert "plugin_call" in program.source


@pytest.mark.parametrize(
    ("which", "complaint"),
    [
        ("wrong", "returned Call, expected source text"),
        ("raises", "failed: ValueError: own"),
        ("double", "returned float64[3, 4], expected float32[3, 4]"),
    ],
)
def test_wrong_writer_is_refused_by_name(acme, which, complaint):
    acme(TEXT.replace("WHICH", which))
    with pytest.raises(PluginError, match="by acme-ops 1.5") as caught:
        run("numpy", lambda x: ops.softmax(x, axis=0), X)
    assert complaint in str(caught.value)


WHEN = """
def rows(node):
    return node.attributes["axis"] == 1

def softmax(x):
    return x * 0 + 5

LOWERINGS = {BACKEND: [("softmax", "acme_lowerings:softmax", "acme_lowerings:rows")] for BACKEND in
             ("numpy", "jax", "torch", "mlx", "c", "ggml")}
"""


@pytest.mark.parametrize("backend", BACKENDS)
def test_condition_of_a_lowering(acme, backend):
    acme(WHEN)
    assert (run(backend, lambda x: ops.softmax(x, axis=1), X)[1] == 5).all()
    program, y = run(backend, lambda x: ops.softmax(x, axis=0), X)
    np.testing.assert_allclose(y.sum(0), 1, rtol=1e-5)
    assert "acme-ops" not in str(program.decisions)


def test_clash_of_lowerings_matters_where_the_operation_is_used(acme):
    acme(kernel("numpy"))

    class Rival:
        def mithril_lowerings(self, backend):
            return [ml.Lowering("softmax", "acme_lowerings:softmax")] if backend == "numpy" else []

    plugins.register(Rival(), "rival")
    try:
        run("numpy", ops.tanh, X)
        with pytest.raises(PluginError, match="lowering on 'numpy' of 'softmax' is claimed by two plugins"):
            run("numpy", lambda x: ops.softmax(x, axis=0), X)
    finally:
        plugins.unregister("rival")


C_TEMPLATE = """
from mithril_cbackend.lowering.element import elementwise


def template(kernel, name, machine):
    from mithril_cbackend import tir as t
    source, target = kernel.inputs[0], kernel.outputs[0]
    import math
    size = math.prod(source.shape)
    code = t.Code()
    x, y = t.pointer("x", "float32"), t.pointer("y", "float32")
    with code.loop("i", size) as i:
        code.store(y[1], i, t.load(x[1], i) * 4.0)
    return t.Function(t.function(name, [x, y], code.finish()), frozenset(), 1)

LOWERINGS = {"c": [("acme_sinc", "acme_lowerings:template")]}
"""


def test_c_lowering_that_writes_a_kernel(acme, tmp_path):
    acme(C_TEMPLATE)
    program, y = run("c", lambda x: ops.acme_sinc(x + 1.0) + 1.0, X)
    np.testing.assert_allclose(y, 4 * (X + 1) + 1, rtol=1e-6)
    assert not program.decisions.of("fallback")
    program.export(tmp_path / "out", format="c", library=None)


GGML_ROW = """
def row(draft, node, x):
    from mithril_ggml.lowering.elementwise import TABLE
    out = draft.like(node.results[0])
    def double(a, result):
        result[...] = a * 2
    draft.numpy("double", double, [x], (out,))
    return out

LOWERINGS = {"ggml": [("acme_sinc", "acme_lowerings:row")]}
"""


def test_ggml_lowering_that_writes_steps(acme):
    acme(GGML_ROW.replace("    from mithril_ggml.lowering.elementwise import TABLE\n", ""))
    program, y = run("ggml", lambda x: ops.acme_sinc(x + 1.0) + 1.0, X)
    np.testing.assert_allclose(y, 2 * (X + 1) + 1, rtol=1e-6)
    assert not program.decisions.of("fallback")
