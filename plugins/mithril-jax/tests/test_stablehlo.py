"""Programs of StableHLO: imported, they equal the functions of JAX that they were lowered from."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mithril as ml
from mithril.models import Linear, Relu

rng = np.random.default_rng(0)


def f(*shape):
    return rng.normal(size=shape).astype(np.float32)


X, Y, W = f(3, 4), f(3, 4), f(4, 5)
IMAGE, KERNEL = f(2, 8, 8, 3), f(3, 3, 3, 4)
PLACES, DIVISORS = np.asarray([2, -1, 7], np.int32), np.asarray([3, 2, -2], np.int32)


def conv(x, k, **options):
    return lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), **options)


def loop(x):
    return lax.fori_loop(0, 5, lambda k, s: s * 1.5 + x[k % 3], jnp.zeros(4))


def attention(x, w):
    q = x @ w
    scores = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((3, 3), bool)), q @ q.T, -jnp.inf))
    return {"probabilities": scores, "mixed": scores @ q}


def integers(i, j):
    return i // j, lax.rem(i, j), i & j, i | j, i ^ j, ~i, i << 1, lax.shift_right_logical(i, 1)


def bools(x, y):
    return jnp.logical_xor(x > 0, y > 0), jnp.any(x > 1, 0), jnp.all(x > -1, 1), (x > 0) + (y > 0)


def reductions(x):
    return x.sum(), x.max(0), x.min(1), x.prod(0), x.mean(), jnp.argmax(x, 1), jnp.argmin(x, 0)


def cumulative(x):
    return jnp.cumsum(x, 0), jnp.cumprod(x, 1), lax.cummax(x, 1), lax.cumsum(x, 0, reverse=True)


def slices(x, i):
    return lax.dynamic_update_slice(x, lax.dynamic_slice(x, (i[0], 0), (1, 2)), (0, i[1]))


CASES = {
    "elements": (lambda x, y: (jnp.tanh(x) * y - jnp.exp(x) / (1 + jnp.abs(y)), lax.rsqrt(jnp.abs(x)), x**3), X, Y),
    "rounding": (lambda x: (jnp.round(x * 3), lax.round(x * 4, lax.RoundingMethod.AWAY_FROM_ZERO), jnp.floor(x)), X),
    "integers": (integers, PLACES, DIVISORS),
    "bools": (bools, X, Y),
    "special functions": (lambda x: (lax.erf(x), lax.erf_inv(x / 4), lax.erfc(x), jnp.arcsinh(x), jnp.cbrt(x)), X),
    "products": (lambda x, w: (x @ w, jnp.einsum("ab,bc->ca", x, w)), X, W),
    "batches of products": (lambda x, y: jnp.einsum("bij,bkj->bik", x.reshape(3, 2, 2), y.reshape(3, 2, 2)), X, Y),
    "layouts": (lambda x: (x.T, x[::-1], jnp.pad(x, 1), x[1:, ::2], jnp.concatenate([x, x], 1), jnp.tile(x, 2)), X),
    "negative padding": (lambda x: lax.pad(x, 2.0, [(-1, 1, 0), (0, 2, 1)]), X),
    "reductions": (reductions, X),
    "reductions with an initial value": (lambda x: (jnp.max(x, 0, initial=0.5), jnp.sum(x, 1, initial=2.0)), X),
    "cumulative": (cumulative, X),
    "sorting": (lambda x: (jnp.sort(x, 0), jnp.argsort(x, 1), lax.top_k(x, 2), -jnp.sort(-x)), X),
    "two keys": (lambda x, y: lax.sort((jnp.round(x), y, x), num_keys=2), X, Y),
    "descending": (lambda x, i: (jnp.sort(x, 1, descending=True), jnp.argsort(i, descending=True)), X, PLACES),
    "softmax": (jax.nn.softmax, X),
    "gelu": (lambda x: jax.nn.gelu(x, approximate=False), X),
    "convolution": (conv, IMAGE, KERNEL),
    "depthwise": (lambda x, k: conv(x, k, feature_group_count=3), IMAGE, f(3, 3, 1, 6)),
    "dilated": (lambda x, k: conv(x, k, rhs_dilation=(2, 2)), IMAGE, KERNEL),
    "transposed": (lambda x, k: lax.conv_transpose(x, k, (2, 2), "SAME"), IMAGE, KERNEL),
    "pools": (lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"), IMAGE),
    "sum pools": (lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 3, 3, 1), (1, 2, 2, 1), "SAME"), IMAGE),
    "rows": (lambda x, i: x[i % 3], X, PLACES),
    "positions": (lambda x: x[jnp.array([0, 2]), jnp.array([3, 1])], X),
    "gather along": (lambda x, y: jnp.take_along_axis(x, jnp.argsort(y, 1), 1), X, Y),
    "updates": (lambda x, y: (x.at[1].add(y[0]), x.at[:, 2].set(0.0), x.at[jnp.array([0, 2])].max(y[:2])), X, Y),
    "outside": (lambda x, i: (x.at[i].set(1.0, mode="drop"), x.at[i].get(mode="clip")), X, PLACES),
    "dynamic slices": (slices, X, PLACES),
    "loop": (loop, X),
    "scan": (lambda x: lax.scan(lambda s, row: (s + row.sum(), s * row), 0.0, x), X),
    "branches": (lambda x: lax.cond(x.sum() > 0, lambda v: v + 1, lambda v: v * 2, x), X),
    "switch": (lambda x, i: lax.switch(i[0], [lambda v: v, lambda v: -v, lambda v: v * 2], x), X, PLACES),
    "keys": (lambda x: x + jax.random.normal(jax.random.key(3), (3, 4)), X),
    "bfloat16": (lambda x: (x.astype(jnp.bfloat16) * jnp.asarray([1.5, 2, 3, 4], jnp.bfloat16)).astype(jnp.float32), X),
    "gradient": (jax.grad(lambda x, w: jnp.square(jnp.tanh(x @ w)).sum(), (0, 1)), X, W),
    "calls": (jax.jit(lambda x: jax.jit(jnp.sin)(x) + jax.jit(jnp.cos)(x)), X),
    "cholesky": (attention, X, W),
    "bits": (lambda x: lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int32) & -2, jnp.float32), X),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_programs_equal_their_functions(name):
    function, *arguments = CASES[name]
    lowered = jax.jit(function).lower(*arguments)
    model = ml.from_stablehlo(lowered.as_text())
    expected = jax.tree_util.tree_leaves(jax.jit(function)(*arguments))
    compiled = ml.compile(model, ml.JaxBackend(), inference=True)
    results = compiled.evaluate({}, dict(zip(model.inputs, arguments, strict=True)))
    assert len(results) == len(expected)
    for result, reference in zip(results.values(), expected, strict=True):
        assert result.dtype == reference.dtype
        np.testing.assert_allclose(
            np.asarray(result, np.float64), np.asarray(reference, np.float64), rtol=2e-5, atol=2e-5
        )


def test_export_and_import_again(tmp_path):
    model = ml.Model()
    model |= Linear(5)(input="x", output="hidden")
    model |= Relu()(input="hidden", output="y")
    compiled = ml.compile(model, ml.JaxBackend(), shapes={"x": [3, 4]})
    params = compiled.randomize_params(0)
    compiled.export(tmp_path / "model.mlir")
    assert "stablehlo.dot_general" in (tmp_path / "model.mlir").read_text()
    again = ml.from_stablehlo(tmp_path / "model.mlir")
    assert set(again.inputs) == {"x", "linear_weight", "linear_bias"}
    assert "y" in again.outputs
    trainable = ml.from_stablehlo(tmp_path / "model.mlir", params={n: np.asarray(p) for n, p in params.items()})
    assert trainable.inputs == ("x",)
    loaded = ml.compile(trainable, ml.JaxBackend())
    expected = compiled.evaluate(params, {"x": X})["y"]
    np.testing.assert_allclose(loaded.evaluate(loaded.params, {"x": X})["y"], expected, rtol=1e-6)
    ones = {"y": np.ones((3, 5), np.float32)}
    _, gradients = loaded.evaluate(loaded.params, {"x": X}, output_gradients=ones)
    assert set(gradients) == set(params)


def test_a_program_is_loaded_from_text_and_bytecode(tmp_path):
    lowered = jax.jit(lambda x: {"y": x * 2}).lower(X)
    for source in (lowered, lowered.as_text()):
        assert ml.from_stablehlo(source).outputs == ("y",)
    exported = jax.export.export(jax.jit(lambda x: {"y": x * 2}))(X)
    (tmp_path / "program.mlir").write_bytes(exported.mlir_module_serialized)
    compiled = ml.load(tmp_path / "program.mlir", backend="jax")
    np.testing.assert_array_equal(compiled({"arg0": X})["y"], X * 2)


@pytest.mark.parametrize("form", ["text", "bytecode"])
def test_open_sizes(form):
    def function(x, w, z):
        mean = x.reshape(x.shape[0] * 2, 2).mean(0)
        return {
            "a": (jax.nn.softmax(jnp.tanh(x @ w) + jnp.ones((x.shape[0], 1)), -1)).reshape(-1).sum() + mean,
            "b": jnp.concatenate([x + z, z[1:], jnp.pad(x, ((1, 0), (0, 0)))]),
            "c": x[::-1] * jnp.arange(x.shape[0])[:, None] + x.shape[0] // 2,
        }

    (n,) = jax.export.symbolic_shape("n,")
    structures = [jax.ShapeDtypeStruct(s, "float32") for s in ((n, 4), (4, 3), (n, 4))]
    exported = jax.export.export(jax.jit(function))(*structures)
    source = str(exported.mlir_module()) if form == "text" else exported.mlir_module_serialized
    compiled = ml.compile(ml.from_stablehlo(source), "jax", inference=True)
    for size in (2, 5):
        rng = np.random.default_rng(size)
        arrays = [rng.normal(size=s).astype(np.float32) for s in ((size, 4), (4, 3), (size, 4))]
        results = compiled({f"arg{k}": a for k, a in enumerate(arrays)})
        for name, expected in function(*arrays).items():
            np.testing.assert_allclose(results[name], expected, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("relation", "specifications", "accepted", "refused"),
    [
        ("==", ["b,", "b,"], [(3, 3), (1, 1)], [(3, 1), (0, 0)]),
        ("<=", ["b,", "c,"], [(4, 1), (7, 8)], [(3, 1), (4, 9)]),
    ],
)
def test_relations_that_an_export_assumes(relation, specifications, accepted, refused):
    constraints = ["b >= 4", "c <= 8"] if relation == "<=" else []
    examples = [jax.ShapeDtypeStruct((1,), "float32")] * 2
    types = jax.export.symbolic_args_specs(examples, specifications, constraints=constraints)
    exported = jax.export.export(jax.jit(lambda x, y: (x.sum(), y * 2)))(*types)
    model = ml.from_stablehlo(exported.mlir_module_serialized)
    compiled = ml.compile(model, "jax", inference=True)

    def inputs(sizes):
        return {f"arg{k}": np.ones(n, np.float32) for k, n in enumerate(sizes)}

    for sizes in accepted:
        assert float(compiled(inputs(sizes))["output0"]) == sizes[0]
    for sizes in refused:
        with pytest.raises(ml.InputError, match="these sizes must satisfy"):
            compiled(inputs(sizes))
        with pytest.raises(ml.InputError, match="do not satisfy the program"):
            ml.compile(model, "jax", inference=True, shapes={f"arg{k}": [n] for k, n in enumerate(sizes)})


def test_a_relation_that_is_known_to_be_false():
    text = (
        "func.func @main(%x: tensor<3xf32>) -> tensor<3xf32> {\n"
        "%c = stablehlo.constant dense<4> : tensor<i32>\n"
        "%n = stablehlo.get_dimension_size %x, dim = 0 : (tensor<3xf32>) -> tensor<i32>\n"
        "%p = stablehlo.compare GE, %n, %c, SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>\n"
        "stablehlo.custom_call @shape_assertion(%p, %n) "
        '{error_message = "found {0}", has_side_effect = true} : (tensor<i1>, tensor<i32>) -> ()\n'
        "return %x : tensor<3xf32>\n}"
    )
    with pytest.raises(ml.InputError, match=r"do not satisfy the program: 3 GE 4\s+found 3"):
        ml.compile(ml.from_stablehlo(text), "jax", inference=True)
    ml.compile(ml.from_stablehlo(text.replace("dense<4>", "dense<3>")), "jax", inference=True)


def test_sizes_that_are_computed_from_data():
    text = (
        "func.func @main(%x: tensor<?xf32>, %n: tensor<1xi32>) -> tensor<?xf32> {\n"
        "%y = stablehlo.dynamic_reshape %x, %n : (tensor<?xf32>, tensor<1xi32>) -> tensor<?xf32>\n"
        "return %y : tensor<?xf32>\n}"
    )
    with pytest.raises(ml.UnsupportedError, match="dynamic_reshape has sizes that are computed from data"):
        ml.compile(ml.from_stablehlo(text), "jax", inference=True, shapes={"arg0": [4], "arg1": [1]})


def test_operations_without_a_meaning_are_listed_together():
    def spectrum(x):
        return jnp.linalg.eigvals(x[:3, :3]).real, jnp.fft.fft(x).real

    names = "custom_call @lapack_sgeev_ffi, stablehlo.complex, stablehlo.fft, stablehlo.real"
    text = jax.jit(spectrum).lower(X).as_text()
    with pytest.raises(ml.UnsupportedError, match=f"4 operations .*: {names}"):
        ml.from_stablehlo(text)


MALFORMED = {
    "no program": ("module {\n", "not a program of StableHLO"),
    "empty": ("module {\n}\n", "has no function"),
    "a call of itself": (
        (
            "module {\nfunc.func @main(%x: tensor<2xf32>) -> tensor<2xf32> {\n"
            "%y = call @main(%x) : (tensor<2xf32>) -> tensor<2xf32>\nreturn %y : tensor<2xf32>\n}\n}"
        ),
        "calls itself",
    ),
    "complex": (
        (
            "module {\nfunc.func @main(%x: tensor<2xcomplex<f32>>) -> tensor<2xcomplex<f32>> {\n"
            "return %x : tensor<2xcomplex<f32>>\n}\n}"
        ),
        "tensors of complex<f32>",
    ),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_programs(name):
    text, message = MALFORMED[name]
    with pytest.raises(ml.MithrilError, match=message):
        ml.compile(ml.from_stablehlo(text), ml.JaxBackend(), inference=True)({"arg0": X[0, :2]})


def test_a_constant_of_a_thousand_million_elements():
    text = (
        "module {\nfunc.func @main(%x: tensor<f32>) -> tensor<f32> {\n"
        "%c = stablehlo.constant dense<3> : tensor<100000x100000x100000xui8>\nreturn %x : tensor<f32>\n}\n}"
    )
    assert (
        float(ml.compile(ml.from_stablehlo(text), ml.JaxBackend(), inference=True)({"arg0": np.float32(2)})["output0"])
        == 2
    )


def test_wrong_sources(tmp_path):
    with pytest.raises(ml.InputError, match="cannot be read"):
        ml.from_stablehlo(tmp_path / "absent.mlir")
    with pytest.raises(ml.InputError, match="cannot be a int"):
        ml.from_stablehlo(3)
    with pytest.raises(ml.InputError, match="no input 'w'"):
        ml.from_stablehlo(jax.jit(jnp.sin).lower(X), params={"w": X})
    open_sizes = ml.compile(Relu(), ml.JaxBackend(), inference=True)
    with pytest.raises(ml.InputError, match="static shapes"):
        open_sizes.export(tmp_path / "open.mlir")


def test_inputs_whose_names_become_one_identifier():
    names = [f'tensor<2xf32> {{mithril.name = "{name}"}}' for name in ("a.b", "a_b")]
    lines = [
        f"func.func public @main(%arg0: {names[0]}, %arg1: {names[1]}) -> tensor<2xf32> {{",
        "  %0 = stablehlo.subtract %arg0, %arg1 : tensor<2xf32>",
        "  return %0 : tensor<2xf32>",
        "}",
    ]
    model = ml.from_stablehlo("\n".join(lines))
    assert model.inputs == ("a_b", "a_b_2")
    x, y = np.full(2, 5, np.float32), np.full(2, 3, np.float32)
    assert ml.compile(model, "numpy", inference=True)({"a_b": x, "a_b_2": y})["output0"].tolist() == [2, 2]
