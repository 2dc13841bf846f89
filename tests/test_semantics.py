"""The meanings on which array libraries disagree, as written down, on the references and on every backend installed."""

from __future__ import annotations

import numpy as np
import pytest

from mithril import ops, plugins
from mithril.derivatives import gradients
from mithril.graph import Builder
from mithril.graph.decomposition import decompose
from mithril.graph.dtypes import dtype as as_dtype
from mithril.graph.errors import MithrilError
from mithril.graph.evaluation import evaluate

F, NAN, INF = np.float32, np.nan, np.inf
BIG = np.full(4096, 32, np.float16)
RUNNERS = ["reference", *sorted(plugins.backends())]


def build(write, arrays):
    with Builder() as b:
        outputs = write(*[b.input(f"x{k}", a.shape, as_dtype(a.dtype)) for k, a in enumerate(arrays)])
    return b.build({"y": outputs})


def run(runner, graph, arrays):
    if runner == "reference":
        with np.errstate(all="ignore"):
            return evaluate(graph, arrays)
    backend = plugins.backend_class(runner)()
    if any(v.dtype not in backend.dtypes for n in graph.nodes for v in (*n.results, *n.operands) if v is not None):
        pytest.skip(f"{runner} has not all of these dtypes")
    executable = backend.build(decompose(graph, backend.lowers))
    outputs = executable({}, {n: backend.array(a) for n, a in arrays.items()})
    return {n: backend.to_numpy(v) for n, v in outputs.items()}


def same(actual, expected):
    expected = np.asarray(expected)
    assert actual.dtype == expected.dtype
    np.testing.assert_allclose(np.asarray(actual, np.float64), np.asarray(expected, np.float64), rtol=1e-5, atol=1e-7)


FORWARD = [
    ("mean of halves", lambda x: ops.mean(x), [BIG], np.float16(32)),
    ("var", lambda x: ops.var(x), [F([1, 2, 4])], F(1.5555556)),
    ("var ddof", lambda x: ops.var(x, ddof=1), [F([1, 2, 4])], F(2.3333333)),
    ("take clamps", lambda x, i: ops.take(x, i), [F([1, 2, 3]), np.int32([5, -1, -9])], F([3, 3, 1])),
    (
        "places that contradict each other",
        lambda v, p, s, x: ops.sparse_matmul(v, p, s, x),
        [F([1, 2, 3, 4]), np.int32([0, 9, -1, -9]), np.int32([3, 99, -5, 1]), F([[1, 2], [3, 5]])],
        F([[0, 0], [1, 2], [19, 33]]),
    ),
    (
        "ctc_loss of two steps, of none and of a label from the end",
        lambda p, labels, steps: ops.ctc_loss(p, labels, steps, reduction="none"),
        [np.zeros((3, 2, 2), F), np.int32([[1], [1], [-1]]), np.int32([99, -1, 2])],
        F([0.2876821, INF, 0.2876821]),
    ),
    ("5 // 0", lambda a, b: ops.floordiv(a, b), [np.int32([5, -7, 7]), np.int32([0, 2, -2])], np.int32([0, -4, -4])),
    ("5 % 0", lambda a, b: ops.mod(a, b), [np.int32([5, -7, 7]), np.int32([0, 2, -2])], np.int32([0, 1, -1])),
    ("cast to int8", lambda x: ops.cast(x, dtype="int8"), [F([300, -300, NAN, -1.5])], np.int8([127, -128, 0, -1])),
    (
        "cast to int32",
        lambda x: ops.cast(x, dtype="int32"),
        [F([3e9, -3e9, NAN, INF])],
        np.int32([2**31 - 1, -(2**31), 0, 2**31 - 1]),
    ),
    ("cast to uint8", lambda x: ops.cast(x, dtype="uint8"), [F([-1.5, 256, 3.9])], np.uint8([0, 255, 3])),
    ("zeros of a constant", lambda x: x @ np.eye(64, 2, dtype=F), [F([[1] * 40 + [NAN] + [1] * 23])], F([[NAN, NAN]])),
    (
        "resize has weights for nan",
        lambda x: ops.where(ops.isnan(ops.resize(x, size=(32,), mode="bilinear"))[..., 20:21], 1.0, 0.0),
        [F([[[1] * 40 + [NAN] + [1] * 23]])],
        F([[[1]]]),
    ),
    ("gelu is exact", lambda x: ops.gelu(x), [F([1])], F([0.8413447])),
    ("gelu tanh", lambda x: ops.gelu(x, approximate="tanh"), [F([1])], F([0.841192])),
    ("sign of nan", lambda x: ops.sign(x), [F([NAN, -2, 0])], F([NAN, -1, 0])),
    ("sum keeps int32", lambda x: ops.sum(x), [np.int32([1, 2])], np.int32(3)),
    ("sum keeps int8", lambda x: ops.sum(x), [np.int8([100, 100])], np.int8(-56)),
    ("1 << 33", lambda a, b: a << b, [np.int32([1, 1]), np.int32([33, 31])], np.int32([0, -(2**31)])),
    ("-8 >> 40", lambda a, b: ops.shift_right(a, b), [np.int32([-8, 8]), np.int32([40, 40])], np.int32([-1, 0])),
    (
        "2 ** -1",
        lambda a, b: a**b,
        [np.int32([2, 1, -1, -1, 3]), np.int32([-1, -5, -5, -4, 3])],
        np.int32([0, 1, -1, 1, 27]),
    ),
    ("argmax of ties", lambda x: ops.argmax(x), [F([1, 3, 3])], np.int32(1)),
    ("argmax of nan", lambda x: ops.argmax(x), [F([1, NAN, 3, NAN])], np.int32(1)),
    ("argmin of nan", lambda x: ops.argmin(x), [F([1, NAN, 0])], np.int32(1)),
    ("max of nan", lambda x: ops.max(x), [F([1, NAN, 3])], F(NAN)),
    ("maximum of nan", lambda a, b: ops.maximum(a, b), [F([NAN, 1]), F([1, NAN])], F([NAN, NAN])),
    ("round", lambda x: ops.round(x), [F([0.5, 1.5, 2.5, -0.5])], F([0, 2, 2, -0.0])),
    ("softmax of -inf", lambda x: ops.softmax(x), [F([[-INF, -INF], [0, 0]])], F([[NAN, NAN], [0.5, 0.5]])),
    ("sort puts nan last", lambda x: ops.sort(x), [F([3, NAN, 1])], F([1, 3, NAN])),
    ("sort downwards", lambda x: ops.sort(x, descending=True), [F([3, NAN, 1])], F([3, 1, NAN])),
    ("argsort is stable", lambda x: ops.argsort(x), [F([1, 0, 1, 0])], np.int32([1, 3, 0, 2])),
    ("top_k of ties", lambda x: ops.top_k(x, k=2)[1], [F([1, 3, 3])], np.int32([1, 2])),
    ("scalars do not widen", lambda x: x * 2.0 + 1, [np.float16([1])], np.float16([3])),
    ("halves of both kinds", lambda x: x + ops.cast(x, dtype="bfloat16"), [np.float16([1])], F([2])),
    ("integer and float", lambda a, b: a + b, [np.int32([1]), np.float16([2])], np.float16([3])),
]


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(("write", "arrays", "expected"), [c[1:] for c in FORWARD], ids=[c[0] for c in FORWARD])
def test_forward(runner, write, arrays, expected):
    graph = build(write, arrays)
    same(run(runner, graph, {f"x{k}": a for k, a in enumerate(arrays)})["y"], expected)


BACKWARD = [
    ("abs at 0", lambda x: ops.abs(x), [F([0, -2])], [F([0, -1])]),
    ("maximum of a tie", lambda a, b: ops.maximum(a, b), [F([1, 2]), F([1, 1])], [F([0.5, 1]), F([0.5, 0])]),
    ("minimum of a tie", lambda a, b: ops.minimum(a, b), [F([1, 2]), F([1, 1])], [F([0.5, 0]), F([0.5, 1])]),
    ("relu at 0", lambda x: ops.relu(x), [F([0, 1, -1])], [F([0, 1, 0])]),
    ("x ** 0 at 0", lambda x: x**0.0, [F([0])], [F([0])]),
    ("max of ties", lambda x: ops.max(x), [F([3, 3, 1])], [F([0.5, 0.5, 0])]),
    ("sqrt of where", lambda x: ops.where(x > 0.0, ops.sqrt(ops.maximum(x, 1.0)), 0.0), [F([4, -1])], [F([0.25, 0])]),
]


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(("write", "arrays", "expected"), [c[1:] for c in BACKWARD], ids=[c[0] for c in BACKWARD])
def test_gradient(runner, write, arrays, expected):
    graph = build(write, arrays)
    inputs = {f"x{k}": a for k, a in enumerate(arrays)}
    backward = gradients(graph, ["y"], list(inputs))
    outputs = run(runner, backward, {**inputs, "grad/y": np.ones(graph.outputs[0].shape, F)})
    for name, gradient in zip(inputs, expected):
        same(outputs[f"grad/{name}"], gradient)


@pytest.mark.parametrize("runner", RUNNERS)
def test_random_words_are_those_of_jax(runner):
    jax = pytest.importorskip("jax")
    key = np.array([0, 42], np.uint32)
    graph = build(lambda k: ops.random_bits(k, shape=(1000,)), [key])
    words = run(runner, graph, {"x0": key})["y"]
    np.testing.assert_array_equal(words, np.asarray(jax.random.bits(jax.random.key(42), (1000,))))
    graph = build(lambda k: ops.uniform(k, shape=(1000,)), [key])
    uniforms = run(runner, graph, {"x0": key})["y"]
    np.testing.assert_array_equal(uniforms, np.asarray(jax.random.uniform(jax.random.key(42), (1000,))))


@pytest.mark.parametrize("runner", sorted(plugins.backends()))
def test_normals_are_the_same_everywhere(runner):
    key = np.array([7, 9], np.uint32)
    graph = build(lambda k: ops.normal(k, shape=(4096,)), [key])
    expected = run("reference", graph, {"x0": key})["y"]
    output = run(runner, graph, {"x0": key})["y"]
    ulp = np.spacing(np.abs(expected))
    assert (
        np.abs(output - expected) <= 2 * ulp
    ).mean() > 0.995  # XLA joins products and sums, which moves a few further
    np.testing.assert_allclose(output, expected, rtol=2e-6, atol=1e-6)


def test_dtypes_that_are_not_there_are_errors():
    for name in plugins.backends():
        backend = plugins.backend_class(name)()
        for kind in ("float64", "int64", "uint16"):
            if as_dtype(kind) not in backend.dtypes:
                x = np.zeros(2, kind)
                graph = build(lambda x: x + x, [x])
                with pytest.raises(MithrilError, match=f"does not support {kind}"):
                    backend.build(decompose(graph, backend.lowers))
