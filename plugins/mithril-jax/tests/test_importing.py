"""``ml.from_jax``: primitives, control flow, transformed functions, custom derivatives, open sizes and errors."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mithril as ml
from mithril import ops
from mithril.graph import InputError, OptionError, UnsupportedError
from mithril_jax.importing.table import ROWS

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
X = np.random.default_rng(0).standard_normal((3, 4, 6)).astype(np.float32)
Y = np.random.default_rng(1).standard_normal((4, 6)).astype(np.float32)
I = np.random.default_rng(2).integers(0, 4, (3, 4)).astype(np.int32)  # noqa: E741

SPD = np.eye(4, dtype=np.float32) * 3 + np.float32(0.2) * (Y[:, :4] + Y[:, :4].T)

EXPRESSIONS = {
    "arithmetic": lambda x, y, i: (x + y) * 2 - x / (jnp.abs(y) + 1) + x**3 + y**2 - (-x),
    "integers": lambda x, y, i: jnp.stack([i // 3, i % 3, (i - 2) // 2, lax.div(i - 2, 2), lax.rem(i - 2, 2)]),
    "bits": lambda x, y, i: (i & 1) | (i ^ 2) | (i << 1) | (~i >> 1),
    "elements": lambda x, y, i: (
        jnp.sin(x) + jnp.tanh(y) + jnp.exp(x) + jnp.log1p(jnp.abs(y)) + jnp.floor(x) + lax.erf(x)
    ),
    "roots": lambda x, y, i: (
        jnp.sqrt(jnp.abs(x)) + jnp.cbrt(y) + lax.rsqrt(jnp.abs(y) + 1) + jnp.exp2(x) + jnp.round(x)
    ),
    "selected": lambda x, y, i: jnp.where(x > 0, x, y) + jnp.clip(x, -0.5, 0.5) + jnp.maximum(x, y),
    "activations": lambda x, y, i: (
        jax.nn.relu(x) + jax.nn.gelu(x) + jax.nn.silu(x) + jax.nn.softplus(x) + jax.nn.elu(x)
    ),
    "softmax": lambda x, y, i: (
        jax.nn.softmax(x, -1) + jax.nn.log_softmax(x, 1) + jax.nn.logsumexp(x, -1, keepdims=True)
    ),
    "reductions": lambda x, y, i: x.sum((0, 2)) + x.max((0, 2)) + x.prod(2).mean(0) + (x > 0).any((0, 2)) + y.var(-1),
    "positions": lambda x, y, i: jnp.argmax(x, 1)[:, :1] + jnp.argmin(y) + jnp.cumsum(i, 1),
    "shapes": lambda x, y, i: x.transpose(2, 0, 1).reshape(6, 12)[::-1, 1:-1:2] + jnp.squeeze(y[:, None], 1)[:1, :1],
    "joined": lambda x, y, i: jnp.concatenate([x, y[None], jnp.broadcast_to(i[..., None], x.shape)[:1]]),
    "padded": lambda x, y, i: (
        jnp.pad(y, ((1, 0), (0, 2)), constant_values=3.0)
        + lax.pad(y, jnp.float32(1.5), ((0, 1, 0), (-1, -2, 1)))[:, :8]
    ),
    "dots": lambda x, y, i: x @ y.T + jnp.einsum("bij,kj->bki", x, y) + jnp.vdot(y, y),
    "sorted": lambda x, y, i: jnp.sort(x, 1) + jnp.argsort(x, -1) + lax.top_k(x, 6)[0],
    "by_index": lambda x, y, i: y[i] + x[:, i[0]].sum() + x[0, 1] + y[i, i].sum(),
    "along": lambda x, y, i: jnp.take_along_axis(x[:, :, 0], i, 1),
    "updated": lambda x, y, i: y.at[i[0]].set(1.0) + y.at[i[0], i[1]].add(2.0) + y.at[1:3].set(3.0).at[0].set(7.0),
    "outside": lambda x, y, i: (
        y.at[i - 2].get(mode="fill", fill_value=3.0)
        + jnp.take(y, i * 2, axis=0, mode="clip")
        + jnp.nan_to_num(jnp.take(y, i * 2, axis=0), nan=5.0)
    ),
    "whole_numbers_outside": lambda x, y, i: [
        jnp.take(i, i[0] + 2, axis=0),
        jnp.take(i.astype("uint32"), i + 2, axis=1),
        jnp.take(i > 1, i + 2, axis=1),
    ],
    "solutions": lambda x, y, i: [
        jnp.linalg.solve(x[:, :, :4] + 3 * jnp.eye(4), y),
        jnp.linalg.inv(SPD),
        jnp.linalg.det(x[:, :, 1:5]),
        jax.grad(lambda a: jnp.linalg.slogdet(a)[1])(SPD),
        lax.linalg.lu(x[0])[2],
        lax.linalg.tridiagonal_solve(jnp.abs(y[0]), jnp.abs(y[1]) + 3, y[2], y.T),
    ],
    "running": lambda x, y, i: [
        lax.cummax(x, 1),
        lax.cummin(i, 0, reverse=True),
        lax.cumlogsumexp(y, 1, reverse=True),
    ],
    "reduced_by_functions": lambda x, y, i: [
        lax.reduce(x, np.float32(2), lambda a, b: a * b + 0 * a, (0, 2)),
        lax.reduce((y, y + 1), (np.float32(-1), np.float32(1)), lambda a, b: (lax.max(a[0], b[0]), a[1] + b[1]), (1,)),
        lax.reduce_window(x, np.float32(1), lax.mul, (1, 2, 3), (1, 1, 2), "SAME"),
        lax.reduce_window(i, np.int32(0), lax.add, (2, 2), (1, 1), ((1, 0), (0, 0)), (1, 2), (1, 2)),
        jax.jvp(lambda a: lax.reduce_window(a, -np.inf, lax.max, (1, 2, 2), (1, 1, 2), "VALID"), (x,), (x * 2,))[1],
        jax.grad(lambda a: (lax.reduce_window(a, -np.inf, lax.max, (2, 3), (1, 2), "SAME") ** 2).sum())(y),
    ],
    "special": lambda x, y, i: [
        lax.bessel_i1e(y * 9),
        lax.nextafter(y, x[0]),
        lax.erfc(x * 3),
        lax.population_count(i * 77 - 5),
        jax.scipy.special.betainc(jnp.abs(x) + 0.2, 3.0, jax.nn.sigmoid(x)),
    ],
    "complex_functions": lambda x, y, i: [
        *(jnp.abs(f(2 * y + 1j * x[0])) for f in (jnp.arccosh, jnp.arcsin, jnp.arctan, jnp.tan, jnp.expm1, lax.rsqrt)),
        jnp.real((y + 1j) ** (x[0] + 0.5j)),
        jnp.imag((y[:, :4] + 1j) @ (y - 2j)),
    ],
    "draws": lambda x, y, i: [
        jax.random.gamma(jax.random.key(1), jnp.abs(y) + 0.1),
        jax.vmap(lambda k: jax.random.uniform(k, (3,)))(jax.random.split(jax.random.key(4), 5)),
    ],
    "dropped": lambda x, y, i: (
        y.at[i[0] * 2].set(1.0)
        + y.at[i[1] * 3].add(2.0)
        + y.at[i[0] * 2, i[2] * 3].max(0.1)
        + y.at[i[0] * 2].multiply(0.5)
        + y.at[i[0] * 2].min(-0.1)
        + y.at[i[0] * 2].set(x[0], mode="clip")
        + y.at[jnp.array([0, 9])].set(4.0)
        + lax.dynamic_update_slice(y, y[:2] * 2, (i[0, 0], 0))
    ),
    "factors": lambda x, y, i: (
        jnp.linalg.cholesky(SPD)
        + lax.linalg.triangular_solve(SPD, y[:, :4], left_side=True, lower=True)
        + lax.linalg.triangular_solve(SPD, y[:, :4], lower=False, transpose_a=True, unit_diagonal=True)
        + jnp.linalg.svd(y, compute_uv=False)
        + jnp.linalg.eigh(SPD + y[:, :4] @ y[:, :4].T)[0]
    ),
    "composed": lambda x, y, i: [
        jnp.abs(jnp.linalg.qr(y.T)[0]),
        jnp.abs(jnp.linalg.svd(y, full_matrices=False)[2]),
        jnp.abs(jnp.linalg.eigh(SPD)[1]),
    ],
    "gamma": lambda x, y, i: jax.scipy.special.gammaln(x * 4) + jax.scipy.special.digamma(x * 3 + 0.01),
    "spectra": lambda x, y, i: [
        jnp.abs(jnp.fft.rfft2(x)),
        jnp.fft.irfft(jnp.fft.rfft(x, axis=1) * jnp.exp(1j * y[:3, :1]), axis=1),
        jnp.fft.ifft(jnp.fft.fft(y + 0.5j * y[::-1]) / (2 + 1j)).imag,
        jnp.fft.fftshift(jnp.fft.fftn(x, axes=(0, 2))).real[:, 1:],
        jnp.abs(jnp.fft.hfft(y, n=8)),
        jnp.real(jnp.conj(jnp.fft.fft(y, n=5, norm="ortho")) ** 2),
        jnp.sum(jnp.fft.fft2(jnp.where(i[..., None] > 1, x, 0.0)), axis=0).real,
        (jnp.log(jnp.fft.fft(y) + 9) + jnp.sqrt(y + 0.5j) * jnp.sin(y + 0.5j) - jnp.cos(y - 2j)).imag,
    ],
    "spectral_gradient": lambda x, y, i: jax.grad(lambda a: (jnp.abs(jnp.fft.rfft(a)) ** 2).sum())(y),
    "dynamic": lambda x, y, i: (
        lax.dynamic_slice(y, (i[0, 0], 1), (2, 3)) + lax.dynamic_update_slice(y, y[:1], (i[0, 1], 0))[:2, :3]
    ),
    "scan": lambda x, y, i: lax.scan(lambda c, e: (c * 0.5 + e, c.sum()), y, x),
    "while": lambda x, y, i: lax.while_loop(lambda c: c[0] < 5, lambda c: (c[0] + 1, c[1] * 1.1), (i[0, 0], y))[1],
    "fori": lambda x, y, i: lax.fori_loop(0, 3, lambda k, c: c + y * k, y),
    "map": lambda x, y, i: lax.map(lambda row: row @ y.T, x),
    "cond": lambda x, y, i: lax.cond(x.sum() > 0, lambda a: a * 2, lambda a: a - 1, x),
    "switch": lambda x, y, i: lax.switch(i[0, 0], [lambda a: a, lambda a: a * 2, lambda a: a - 1, jnp.sin], y),
    "conv": lambda x, y, i: lax.conv_general_dilated(
        x[:, None], y[:, None, None, :3], (1, 2), ((0, 0), (2, 1)), rhs_dilation=(1, 2)
    ),
    "nhwc": lambda x, y, i: lax.conv_general_dilated(
        x[..., None], y[None, :3, None], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    ),
    "pools": lambda x, y, i: (
        lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2), (1, 2, 2), "VALID")
        + lax.reduce_window(x, 0.0, lax.add, (1, 2, 2), (1, 2, 2), "VALID")
    ),
    "gradient": lambda x, y, i: jax.grad(lambda a: (jnp.tanh(a @ y.T) ** 2).sum())(x),
    "hessian": lambda x, y, i: jax.hessian(lambda a: (jnp.sin(a) @ y.T).sum())(y[0]),
    "vmapped": lambda x, y, i: jax.vmap(lambda a, k: a[k] @ a.T)(x, i),
    "remat": lambda x, y, i: jax.checkpoint(lambda a: jnp.sin(a) * a)(x),
    "forward": lambda x, y, i: jax.jvp(lambda a: jax.nn.softmax(a @ y.T), (x,), (x * 0.1,))[1],
    "random": lambda x, y, i: (
        jax.random.normal(jax.random.key(3), (3, 4))
        + jax.random.uniform(jax.random.fold_in(jax.random.key(1), 7), (4,))
    ),
    "keys": lambda x, y, i: jax.random.randint(jax.random.split(jax.random.key(0), 3)[1], (5,), 0, 100),
}


def run(model, *inputs, **options):
    compiled = ml.compile(model, "jax", inference=True, **options)
    return [np.asarray(y) for y in compiled.evaluate(dict(zip(model.inputs, inputs, strict=True))).values()]


def test_functions_match_jax():
    """All expressions are one function: one import and one compilation."""

    def function(x, y, i):
        return {name: expression(x, y, i) for name, expression in EXPRESSIONS.items()}

    expected = jax.tree_util.tree_leaves(jax.jit(function)(X, Y, I))
    model = ml.from_jax(function, X, Y, I)
    assert model.inputs == ("x", "y", "i") and len(model.outputs) == len(expected)
    for name, result, reference in zip(model.outputs, run(model, X, Y, I), expected, strict=True):
        assert result.dtype == reference.dtype, name
        np.testing.assert_allclose(result, reference, rtol=1e-4, atol=2e-5, err_msg=name)


def network(params, x):
    h = jax.nn.relu(x @ params["layers"][0]["kernel"] + params["layers"][0]["bias"])
    return {"logits": h @ params["head"], "hidden": h}


def test_parameters_train_and_sizes_stay_open():
    rng = np.random.default_rng(0)
    params = {
        "layers": [{"kernel": rng.normal(size=(4, 8)).astype(np.float32), "bias": np.ones(8, np.float32)}],
        "head": rng.normal(size=(8, 2)).astype(np.float32),
    }
    x = rng.normal(size=(5, 4)).astype(np.float32)
    model = ml.from_jax(network, x, params=params, dynamic_shapes={"x": {0: "batch"}})
    compiled = ml.compile(model, "jax")
    assert set(compiled.params) == {"layers.0.kernel", "layers.0.bias", "head"}
    for rows in (5, 2):
        outputs = compiled.evaluate({"x": x[:rows]})
        np.testing.assert_allclose(outputs["logits"], network(params, x[:rows])["logits"], rtol=1e-4, atol=1e-5)
    g = rng.normal(size=(5, 2)).astype(np.float32)
    _, gradients = compiled.evaluate(compiled.params, {"x": x}, {"logits": g})
    expected = jax.grad(lambda p: (network(p, x)["logits"] * g).sum())(params)
    np.testing.assert_allclose(gradients["layers.0.kernel"], expected["layers"][0]["kernel"], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(gradients["head"], expected["head"], rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_modules_of_flax():
    """Import a Linen module with statistics, and an NNX module whose parameters have gradients."""
    nn, nnx = pytest.importorskip("flax.linen"), pytest.importorskip("flax.nnx")

    class Linen(nn.Module):
        @nn.compact
        def __call__(self, x):
            h = nn.relu(nn.Conv(5, (3,))(x))
            h = nn.BatchNorm(use_running_average=True)(h)
            return nn.Dense(2)(nn.LayerNorm()(h) + nn.SelfAttention(num_heads=1)(h))

    linen = Linen()
    variables = linen.init(jax.random.key(0), X)

    class Nnx(nnx.Module):
        def __init__(self, rngs):
            self.first, self.norm = nnx.Linear(6, 8, rngs=rngs), nnx.LayerNorm(8, rngs=rngs)
            self.table, self.head = nnx.Embed(4, 8, rngs=rngs), nnx.LinearGeneral(8, (2, 3), rngs=rngs)

        def __call__(self, x):
            return self.head(nnx.gelu(self.norm(self.first(x))) + self.table(I))

    graph, state = nnx.split(Nnx(nnx.Rngs(0)))

    def merged(state, x):
        return nnx.merge(graph, state)(x)

    for function, params in ((linen.apply, variables), (merged, state)):
        model = ml.from_jax(function, X, params=params)
        compiled = ml.compile(model, "jax")
        expected, pull = jax.vjp(lambda p, f=function: f(p, X), params)
        result, gradients = compiled.evaluate(
            compiled.params, {model.inputs[0]: X}, np.ones(expected.shape, np.float32)
        )
        np.testing.assert_allclose(next(iter(result.values())), expected, rtol=1e-4, atol=1e-5)
        leaves, _ = jax.tree_util.tree_flatten_with_path(pull(jnp.ones_like(expected))[0])
        assert len(gradients) == len(leaves)
        for path, leaf in leaves:
            name = ".".join(re.findall(r"\w+", jax.tree_util.keystr(path))).removesuffix(".value")
            np.testing.assert_allclose(gradients[name], leaf, rtol=1e-3, atol=1e-4)


@jax.custom_jvp
def doubled(x):
    return x * 2


doubled.defjvp(lambda primals, tangents: (doubled(primals[0]), tangents[0] * 7 * primals[0]))


@jax.custom_vjp
def straight_through(x):
    return jnp.round(x)


straight_through.defvjp(lambda x: (jnp.round(x), x), lambda x, g: (g * x * 3,))


@jax.custom_vjp
def clipped(x):
    return x * 1.0


clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -1, 1),))


@pytest.mark.parametrize("function", [doubled, straight_through, jax.nn.relu])
def test_custom_derivatives_are_retained(function):
    x = np.array([-1.5, 0.0, 0.7, 2.0], np.float32)
    model = ml.from_jax(lambda x: function(x) * 2.0, x)
    compiled = ml.compile(model, "jax", trainable=["x"])
    outputs, gradients = compiled.evaluate({}, {"x": x}, {"output": np.ones(4, np.float32)}, wrt=["x"])
    np.testing.assert_allclose(outputs["output"], function(x) * 2)
    np.testing.assert_allclose(gradients["x"], jax.grad(lambda a: function(a).sum() * 2)(x))


def test_the_derivative_is_part_of_the_fingerprint():
    from mithril.system import fingerprint

    def model(factor):
        @jax.custom_jvp
        def f(x):
            return x * 2

        f.defjvp(lambda primals, tangents: (f(primals[0]), tangents[0] * factor))
        return ml.from_jax(f, X)

    digests = [fingerprint(model(factor).steps[0].layer) for factor in (3.0, 3.0, 4.0)]
    assert digests[0] == digests[1] != digests[2]


def test_second_derivatives_of_custom_rules_are_imported_from_jax():
    @jax.custom_jvp
    def rule(x):
        return jnp.sin(x)

    rule.defjvp(lambda primals, tangents: (rule(*primals), primals[0] ** 3 * tangents[0]))
    f = jax.hessian(lambda x: (rule(x) * x).sum())
    (result,) = run(ml.from_jax(f, Y[0]), Y[0])
    np.testing.assert_allclose(result, f(Y[0]), rtol=1e-5, atol=1e-6)


def test_errors_name_the_primitive_and_the_line():
    with pytest.raises(UnsupportedError) as info:
        ml.from_jax(lambda x: lax.polygamma(x, x) + lax.polygamma(x + 1, x), X)
    assert "polygamma, 2 times: " in str(info.value) and "test_importing.py:" in str(info.value)
    with pytest.raises(UnsupportedError, match="complex results of a function"):
        ml.from_jax(jnp.fft.fft, X)
    with pytest.raises(UnsupportedError, match="'cumprod' of complex numbers cannot be expressed"):
        ml.compile(ml.from_jax(lambda x: jnp.cumprod(jnp.fft.fft(x), 1).real, X), "jax")
    with pytest.raises(UnsupportedError, match=r"to the power -2 cannot be expressed(\n|.)*1 / z\*\*n"):
        ml.compile(ml.from_jax(lambda x: (jnp.fft.fft(x) ** -2).real, X), "jax")
    with pytest.raises(UnsupportedError, match="complex numbers in 'scan'"):
        ml.compile(ml.from_jax(lambda x: lax.scan(lambda c, e: (c + e, e), x[0] + 0j, x)[0].real, X), "jax")
    with pytest.raises(UnsupportedError, match="not linear in the cotangent"):
        ml.compile(ml.from_jax(clipped, X), "jax")
    module = type("Dense", (), {"apply": None, "scope": None, "__call__": lambda self, x: x})()  # of Flax, not bound
    with pytest.raises(InputError, match=r"got the Flax module Dense(?s:.)*ml.from_jax\(module.apply, x, params="):
        ml.from_jax(module, X)
    with pytest.raises(OptionError, match="function: expected a function, got 3"):
        ml.from_jax(3, X)
    with pytest.raises(InputError, match="'z', which is not an example"):
        ml.from_jax(jnp.sin, X, dynamic_shapes={"z": {0: "batch"}})
    with pytest.raises(InputError, match="example 'x' is a str"):
        ml.from_jax(lambda x: x, "text")


def test_means_over_open_sizes():
    """Sizes are numbers in the formula of a mean, of a variance and of positions."""

    def function(x):
        return (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-5) + jnp.arange(x.shape[0])[:, None]

    compiled = ml.compile(ml.from_jax(function, X[0], dynamic_shapes={"x": {0: "batch"}}), "jax")
    for x in (X[0], np.tile(X[0], (3, 1))):
        (y,) = compiled({"x": x}).values()
        np.testing.assert_allclose(y, function(x), rtol=1e-5, atol=1e-6)


NAN, INF = float("nan"), float("inf")
SPECIAL = np.array([[1.0, NAN, 3.0, INF], [INF, 2.0, NAN, NAN], [0.0, -1.0, -INF, 5.0]], np.float32)
SQUARE = np.array([[4.0, 9.0, 8.0], [1.0, 5.0, 7.0], [0.5, -1.0, 6.0]], np.float32)
VALUES = {
    "top_k": (lambda x: jax.lax.top_k(x, 2), SPECIAL),
    "top_k_axis": (lambda x: jax.lax.top_k(x, 2, axis=0), SPECIAL),
    "sort": (lambda x: jnp.sort(x, descending=True), SPECIAL),
    "cholesky": (lambda x: jnp.tril(jax.lax.linalg.cholesky(x, symmetrize_input=False)), SQUARE),
    "eigh": (lambda x: jax.lax.linalg.eigh(x, symmetrize_input=False)[1], SQUARE),
    "eigh_upper": (lambda x: jax.lax.linalg.eigh(x, lower=False, symmetrize_input=False)[1], SQUARE),
    "lgamma": (lambda x: jax.lax.lgamma(x), np.array([7.5, 0.5, 60.0], np.float16)),
    "digamma": (lambda x: jax.lax.digamma(x), np.array([7.5, 0.5, 60.0], np.float16)),
    "written_columns": (lambda x: jnp.asarray(x).at[:, np.array([2, 0])].set(x[:, :2] * 2), SQUARE),
    "written_cubes": (
        lambda x: jnp.asarray(x[None] + x[:, None]).at[:, np.array([2, 0]), :].add(x[:, :2, None]),
        SQUARE,
    ),
    "written_pairs": (
        lambda x: jnp.asarray(x[None] + x[:, None]).at[np.array([1, 2]), :, np.array([2, 0])].set(x[:2]),
        SQUARE,
    ),
    "wrapped": (lambda x: x.astype(jnp.uint8), np.array([-1, 200, 300], np.int32)),
}


@pytest.mark.parametrize("name", VALUES)
def test_values_equal_those_of_jax(name):
    function, x = VALUES[name]
    model = ml.from_jax(function, x)
    results = list(ml.compile(model, "numpy", inference=True).evaluate({"x": x}).values())
    for result, expected in zip(results, jax.tree_util.tree_leaves(function(x)), strict=True):
        tolerance = 2e-3 if x.dtype == np.float16 else 1e-5
        assert result.dtype == expected.dtype
        np.testing.assert_allclose(result, expected, rtol=tolerance, atol=1e-6)


@pytest.mark.parametrize("wrong", [lambda x: x[:1], lambda x: ops.cast(x, dtype="int32"), lambda x: None])
def test_result_of_another_type_is_rejected(monkeypatch, wrong):
    ml.compile(ml.from_jax(jnp.tanh, np.ones(3, np.float32)), "numpy")  # loads the rows, which replace earlier ones
    monkeypatch.setitem(ROWS, "tanh", lambda x, **_: wrong(x))
    model = ml.from_jax(lambda x: jnp.tanh(x) * 2, np.ones((3, 4), np.float32))
    with pytest.raises(UnsupportedError, match="a result of 'tanh' is .*in JAX it is float32") as error:
        ml.compile(model, "numpy", inference=True)
    assert "test_importing.py" in str(error.value)


# -- the source beside the imported function ----------------------------------------------------------------------
def test_a_broken_row_is_named_with_its_line_and_both_values(monkeypatch):
    def function(params, x, key):
        return {"y": jnp.tanh(x @ params["w"]) + params["b"] + jax.random.uniform(key, (4,))}

    params, key = {"w": Y.T, "b": np.ones(4, np.float32)}, jax.random.key(3)
    model = ml.from_jax(function, X[0, :3], key, params=params, dynamic_shapes={"x": {0: "n"}})
    inputs = {"x": X[1], "key": np.asarray(jax.random.key_data(key))}
    assert ml.verify(model, function, inputs), "with another size than that of the trace"
    monkeypatch.setitem(ROWS, "tanh", lambda x, **_: ops.sin(x))
    first = ml.verify(model, function, inputs, backend="numpy").first
    assert first.node.op.name == "sin" and first.node.origin.file == __file__
    _, expected, actual = first.largest
    assert abs(expected - actual) > 0.1
    with pytest.raises(InputError, match="other primitives"):
        ml.verify(model, lambda p, x, key: {"y": function(p, x, key)["y"] + 1}, inputs)


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda x: x if x.sum() > 0 else -x, "TracerBoolConversionError"),
        (lambda x: x @ x, "dot_general requires"),
        (lambda params, x: x, r"TypeError: .* missing 1 required positional argument: 'x'"),
    ],
)
def test_functions_that_jax_cannot_trace(function, text):
    with pytest.raises(UnsupportedError, match=f"JAX cannot trace this function: .*{text}") as caught:
        ml.from_jax(function, np.ones((2, 3), np.float32))
    assert "params=tree" in caught.value.hint


def test_leaves_whose_paths_become_one_name():
    params = {"a": {"b": np.full(2, 3, np.float32)}, "a.b": np.full(2, 5, np.float32)}

    def f(params, x, x_b):
        return {"a": {"b": x["b"] * params["a"]["b"]}, "a_b": x_b + params["a.b"]}

    model = ml.from_jax(f, {"b": np.ones(2, np.float32)}, np.ones(2, np.float32), params=params)
    compiled = ml.compile(model, "numpy", inference=True)
    assert model.inputs == ("x_b", "x_b_2") and sorted(compiled.params) == ["a.b", "a.b_2"]
    outputs = compiled({"x_b": np.full(2, 10, np.float32), "x_b_2": np.full(2, 20, np.float32)})
    assert {name: y.tolist() for name, y in outputs.items()} == {"a_b": [30, 30], "a_b_2": [25, 25]}
