"""Every function of the standard equals that of array-api-strict, or of NumPy, over dtypes, shapes and edge values."""

import inspect
import math

import array_api_strict as strict
import numpy as np
import pytest

import mithril as ml

xp = ml.array_api("numpy")
SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 3.5, math.inf, -math.inf, math.nan, 1e-8, 700.0]
INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
FLOATS, COMPLEX = ["float32", "float64"], ["complex64", "complex128"]
strict.set_array_api_strict_flags(api_version="2024.12")


def operand(dtype, shape=None, seed=0):
    """Return random numbers, or edge values, as a NumPy array."""
    rng = np.random.default_rng(seed)
    if dtype == "bool":
        return np.asarray(rng.integers(0, 2, (3, 4) if shape is None else shape)).astype(bool)
    if dtype in INTEGERS:
        size = (3, 4) if shape is None else shape
        return np.asarray(rng.integers(0 if dtype[0] == "u" else -5, 9, size)).astype(dtype)
    if dtype in FLOATS:
        values = np.array(SPECIAL) if shape is None else np.asarray(rng.normal(size=shape))
        return rng.permutation(values).astype(dtype) if shape is None else values.astype(dtype)
    size = (3, 4) if shape is None else shape
    return np.asarray(rng.normal(size=size) + 1j * rng.normal(size=size)).astype(dtype)


def check(function, *arrays, tolerance=1e-6, reference=strict, **keywords):
    """Compare a function of the namespace with that of the reference, results and dtypes."""

    def run(namespace):
        target = namespace
        for part in function.split("."):
            target = getattr(target, part)
        with np.errstate(all="ignore"):

            def convert(a):
                return namespace.asarray(a) if isinstance(a, np.ndarray) else a

            return target(*map(convert, arrays), **{k: convert(v) for k, v in keywords.items()})

    actual, expected = run(xp), run(reference)
    several = isinstance(actual, tuple | list)
    for a, b in zip(actual if several else [actual], expected if several else [expected], strict=True):
        a, b = a.numpy() if hasattr(a, "numpy") else np.asarray(a), np.asarray(b)
        assert a.dtype == b.dtype, (function, a.dtype, b.dtype)
        if a.dtype.kind in "fc":
            single = a.dtype in (np.float32, np.complex64)
            np.testing.assert_allclose(a, b, rtol=1e-4 if single else tolerance, atol=1e-5 if single else 1e-8)
        else:
            np.testing.assert_array_equal(a, b)


UNARY = {
    "abs negative positive square sign": INTEGERS + FLOATS + COMPLEX,
    "ceil floor round trunc": INTEGERS + FLOATS,
    "isfinite isinf isnan": INTEGERS + FLOATS + COMPLEX,
    "acos acosh asin asinh atan atanh cos cosh exp expm1 log log1p log10 log2 sin sinh sqrt tan tanh": FLOATS + COMPLEX,
    "reciprocal": FLOATS,
    "conj imag real": COMPLEX,
    "signbit": FLOATS,
    "logical_not bitwise_invert": ["bool"],
}
BINARY = {
    "add subtract multiply": INTEGERS + FLOATS + COMPLEX,
    "divide": FLOATS + COMPLEX,
    "equal not_equal": ["bool", *INTEGERS, *FLOATS, *COMPLEX],
    "less less_equal greater greater_equal maximum minimum": INTEGERS + FLOATS,
    "floor_divide remainder": FLOATS,
    "atan2 copysign hypot logaddexp nextafter": FLOATS,
    "bitwise_and bitwise_or bitwise_xor": ["bool", *INTEGERS],
    "logical_and logical_or logical_xor": ["bool"],
}


@pytest.mark.parametrize("names", UNARY)
def test_unary(names):
    for name in names.split():
        for dtype in UNARY[names]:
            if not (name == "abs" and dtype[0] == "u") and not (name == "negative" and dtype[0] == "u"):
                check(name, operand(dtype))
    x = operand("float64", (2, 0, 3))
    for name in names.split():
        if "float64" in UNARY[names]:
            check(name, x)


@pytest.mark.parametrize("names", BINARY)
def test_binary(names):
    for name in names.split():
        for dtype in BINARY[names]:
            x = operand(dtype)
            if name in ("floor_divide", "remainder"):
                x = x[np.isfinite(x)]  # the standard has infinite quotients, NumPy nan
            check(name, x, operand(dtype, x.shape, 1))
            check(name, operand(dtype, (2, 1, 3), 2), operand(dtype, (4, 1), 3))
            check(name, operand(dtype, (2, 3), 4), operand(dtype, (), 5))


@pytest.mark.parametrize("name", ["floor_divide", "remainder"])
def test_integer_division(name):
    for dtype in INTEGERS:
        x, y = operand(dtype), operand(dtype, (3, 4), 1)
        check(name, x, np.where(y == 0, 1, y).astype(dtype))
        assert not np.any(getattr(xp, name)(xp.asarray(x), xp.zeros((3, 4), dtype=dtype)).numpy())


@pytest.mark.parametrize("name", ["bitwise_left_shift", "bitwise_right_shift"])
def test_shifts(name):
    for dtype in INTEGERS:
        check(name, operand(dtype), np.arange(4).astype(dtype))


def test_pow():
    x = np.array([0.0, 1.0, 2.0, -2.0, 0.5, math.inf, math.nan])
    check("pow", x[:, None], np.array([0.0, 1.0, 2.0, -3.0, 0.5, math.inf]))
    check("pow", operand("int64"), np.arange(4))
    check("pow", operand("complex128"), operand("complex128", (4,), 1))


def test_promotion():
    dtypes = ["bool", *INTEGERS, *FLOATS, *COMPLEX]
    for a in dtypes:
        for b in dtypes:
            try:
                expected = strict.result_type(getattr(strict, a), getattr(strict, b))
            except TypeError:  # undefined in the standard
                continue
            assert xp.result_type(getattr(xp, a), getattr(xp, b)).name == str(expected._np_dtype)
            assert xp.can_cast(getattr(xp, a), getattr(xp, b)) == strict.can_cast(
                getattr(strict, a), getattr(strict, b)
            )
    x = xp.asarray([1, 2], dtype=xp.int8)
    assert (x + 1).dtype is xp.int8
    assert (1.5 + xp.asarray([1.0], dtype=xp.float32)).dtype is xp.float32
    assert (xp.asarray([1.0], dtype=xp.float32) * 1j).dtype is xp.complex64


@pytest.mark.parametrize("name", ["sum", "prod", "max", "min", "mean", "std", "var", "all", "any", "count_nonzero"])
def test_reductions(name):
    few = FLOATS if name in ("mean", "std", "var") else ["int8", "uint8", "int64", *FLOATS]
    for dtype in few + (COMPLEX if name in ("sum", "prod", "mean", "all", "any", "count_nonzero") else []):
        x = operand(dtype, (3, 4, 2))
        for axis in (None, 0, -1, (0, 2)):
            for keepdims in (False, True):
                check(name, x, axis=axis, keepdims=keepdims)
    if name in ("sum", "prod", "all", "any", "count_nonzero"):
        check(name, operand("float64", (2, 0)), axis=1)


def test_options_of_reductions():
    x = operand("float64", (5, 3))
    for correction in (0, 1, 0.5):
        check("var", x, axis=0, correction=correction)
        check("std", x, correction=correction)
    check("sum", operand("int8"), dtype=None)
    for name in ("cumulative_sum", "cumulative_prod"):
        for dtype in ["int8", "uint16", *FLOATS, *COMPLEX]:
            check(name, operand(dtype, (3, 5)), axis=1)
            check(name, operand(dtype, (4,)), include_initial=True)
    check("diff", x, axis=0, n=2)
    check("diff", x, prepend=operand("float64", (5, 1)), append=operand("float64", (5, 2)))


def test_order():
    for dtype in [*INTEGERS, *FLOATS]:
        x = operand(dtype, (4, 5))
        for axis in (0, -1):
            for descending in (False, True):
                check("sort", x, axis=axis, descending=descending)
                check("argsort", x, axis=axis, descending=descending)
            check("argmax", x, axis=axis, keepdims=True)
            check("argmin", x, axis=axis)
        check("argmax", x)
        check("argmin", x, keepdims=True)
        check("searchsorted", np.sort(x[0]), x, side="right")
    check(
        "searchsorted",
        operand("float64", (5,)),
        operand("float64", (3,), 1),
        sorter=np.argsort(operand("float64", (5,))),
    )


def test_sizes_that_depend_on_elements():
    for dtype in ["bool", *INTEGERS, *FLOATS, *COMPLEX]:
        x = operand(dtype, (3, 4))
        for name in ("nonzero", "unique_all", "unique_counts", "unique_inverse", "unique_values"):
            check(name, x)
        check("repeat", x, 2, axis=1)
        check("repeat", x, np.array([1, 0, 2]), axis=0)
    assert xp.unique_values(xp.asarray([math.nan, math.nan, 1.0])).shape == (3,)


def test_creation():
    for dtype in [*INTEGERS, *FLOATS]:
        check("arange", 2, 11, 3, dtype=None)
        for call in (
            lambda n, d: n.arange(2, 11, 3, dtype=d),
            lambda n, d: n.zeros((2, 3), dtype=d),
            lambda n, d: n.full((2,), 3, dtype=d),
            lambda n, d: n.eye(3, 4, k=1, dtype=d),
            lambda n, d: n.ones_like(n.zeros((2,), dtype=d)),
        ):
            actual, expected = call(xp, getattr(xp, dtype)), call(strict, getattr(strict, dtype))
            np.testing.assert_array_equal(actual.numpy(), np.asarray(expected))
    check("linspace", 0.0, 1.0, 5)
    check("linspace", 0.0, 1.0, 5, endpoint=False)
    check("meshgrid", np.arange(3.0), np.arange(2.0), indexing="xy")
    check("meshgrid", np.arange(3.0), np.arange(2.0), np.arange(4.0), indexing="ij")
    for name in ("tril", "triu"):
        for k in (-1, 0, 2, 99):
            check(name, operand("complex128", (2, 3, 4)), k=k)
    assert xp.asarray([1, 2]).dtype is xp.int64
    assert xp.asarray([1.0, 2]).dtype is xp.float64
    assert xp.asarray([1j]).dtype is xp.complex128
    assert xp.asarray([True]).dtype is xp.bool
    assert xp.arange(2**63, 2**63 + 2, dtype=xp.uint64).numpy().tolist() == [2**63, 2**63 + 1]


def test_movement():
    x = operand("complex64", (2, 3, 4))
    check("reshape", x, (4, -1))
    check("permute_dims", x, (2, 0, 1))
    check("moveaxis", x, (0, 1), (-1, 0))
    check("expand_dims", x, axis=-2)
    check("squeeze", x[:, :1], 1)
    check("flip", x, axis=(0, -1))
    check("flip", x)
    check("roll", x, (1, -2), axis=(0, 2))
    check("roll", x, 5)
    check("tile", x, (2, 1))
    check("broadcast_to", x[:, :1], (2, 3, 4))
    check("matrix_transpose", x)
    check("take", x, np.array([2, 0]), axis=1)
    check("take_along_axis", x, np.array([[[0], [1], [0]]]), axis=0)
    check("unstack", x, axis=1)
    for name in ("concat", "stack"):
        actual, expected = (getattr(n, name)([n.asarray(x), n.asarray(x[::-1])], axis=1) for n in (xp, strict))
        np.testing.assert_array_equal(actual.numpy(), np.asarray(expected))


def test_clip_and_where():
    for dtype in [*INTEGERS, *FLOATS]:
        check("clip", operand(dtype, (3, 4)), 1, 4)
        check("clip", operand(dtype, (3, 4)), max=2)
    x = operand("complex128")
    check("where", operand("bool", (3, 4)), x, operand("complex128", (4,), 1))


def test_products():
    for dtype in [*INTEGERS[2:4], *FLOATS, *COMPLEX]:
        a, b = operand(dtype, (2, 3, 4)), operand(dtype, (4, 5), 1)
        check("matmul", a, b)
        check("matmul", a, operand(dtype, (4,), 2))
        check("tensordot", a, b, axes=1)
        check("tensordot", a, operand(dtype, (3, 2), 3), axes=((0, 1), (1, 0)))
        check("vecdot", a, operand(dtype, (3, 4), 4))
        check("linalg.outer", a[0, 0], b[0])
        check("linalg.cross", operand(dtype, (2, 3)), operand(dtype, (2, 3), 1))
        check("linalg.diagonal", a, offset=1)
        check("linalg.trace", a, offset=-1)


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
def test_linear_algebra(dtype):
    x, b = operand(dtype, (2, 3, 3)), operand(dtype, (2, 3, 2), 1)
    definite = (x @ x.conj().swapaxes(-1, -2) + np.eye(3)).astype(dtype)
    check("linalg.cholesky", definite)
    check("linalg.cholesky", definite, upper=True)
    for name in ("det", "inv", "slogdet", "svdvals", "matrix_rank"):
        check(f"linalg.{name}", definite)
    check("linalg.pinv", b)
    check("linalg.eigvalsh", definite)
    check("linalg.solve", definite, b)
    check("linalg.matrix_power", x, 5)
    check("linalg.matrix_power", definite, -2)
    for order in ("fro", "nuc", 1, -1, 2, -2, math.inf, -math.inf):
        check("linalg.matrix_norm", b, ord=order, keepdims=order == 2)
    for order in (0, 1, 2, 3, math.inf, -math.inf, 0.5):
        check("linalg.vector_norm", b, axis=1, ord=order)
    a = xp.asarray(b)
    for mode in ("reduced", "complete"):
        q, r = xp.linalg.qr(a, mode=mode)
        np.testing.assert_allclose((q @ r).numpy(), b, atol=1e-5)
    for full in (False, True):
        u, s, vh = xp.linalg.svd(a, full_matrices=full)
        rebuilt = (u[..., :2] * xp.astype(s, u.dtype)[:, None, :]) @ vh
        np.testing.assert_allclose(rebuilt.numpy(), b, atol=1e-5)
    values, vectors = xp.linalg.eigh(xp.asarray(definite))
    np.testing.assert_allclose(
        (xp.asarray(definite) @ vectors).numpy(), (vectors * values[:, None, :]).numpy(), rtol=1e-3, atol=1e-4
    )


@pytest.mark.parametrize("norm", ["backward", "ortho", "forward"])
def test_transforms(norm):
    x, z = operand("float64", (3, 6)), operand("complex128", (3, 6))
    for n in (None, 4, 9):
        for name in ("fft", "ifft", "irfft", "hfft"):
            check(f"fft.{name}", z, n=n, norm=norm)
        for name in ("rfft", "ihfft"):
            check(f"fft.{name}", x, n=n, axis=0, norm=norm)
    for name in ("fftn", "ifftn", "irfftn"):
        check(f"fft.{name}", z, norm=norm)
        check(f"fft.{name}", z, s=(4, 5), axes=(0, 1), norm=norm)
    check("fft.rfftn", x, norm=norm)
    check("fft.fftshift", z)
    check("fft.ifftshift", z, axes=1)
    check("fft.fftfreq", 5, d=0.5)
    check("fft.rfftfreq", 6)


OTHERS = ("fft", "linalg", "Device", "__version__", "ArrayAPIStrictFlags", "isin", "broadcast_shapes")


def test_every_name_of_the_standard_with_its_signature():
    for namespace, reference in ((xp, strict), (xp.fft, strict.fft), (xp.linalg, strict.linalg)):
        for name in reference.__all__:
            if (
                name in ("fft", "linalg", "Device", "__version__", "ArrayAPIStrictFlags", "isin", "broadcast_shapes")
                or "strict" in name
            ):
                continue
            expected = getattr(reference, name)
            assert hasattr(namespace, name), name
            if not inspect.isfunction(expected):
                continue
            kinds = {p.name: p.kind for p in inspect.signature(getattr(namespace, name)).parameters.values()}
            for p in inspect.signature(expected).parameters.values():
                if p.kind is p.KEYWORD_ONLY or p.default is not p.empty:
                    assert p.name in kinds, (name, p.name)
