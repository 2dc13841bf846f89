"""The array object: indexing, assignment, exchange of memory, errors; on every engine that is installed."""

import importlib.util
import math
import pickle
from pathlib import Path

import numpy as np
import pytest

import mithril as ml
from mithril.models import Linear
from mithril_array.array import COMPARISONS, OPERATORS

MODULES = {"numpy": "mithril_numpy", "c": "mithril_cbackend", "torch": "mithril_torch", "jax": "mithril_jax"}
ENGINES = [name for name, module in MODULES.items() if importlib.util.find_spec(module)]
KEYS = [
    0, -1, (1, 2), slice(1, None), (slice(None), 1), (..., slice(None, None, -1)), (None, 1, ...),
    (slice(0, 3, 2), None, -2),
    np.array([2, 0]), (np.array([1, 0]), np.array([3, 1])), (slice(None), np.array([[1], [2]])),
]  # fmt: skip
VALUES = np.arange(12.0).reshape(3, 4)

INTEGER_OPERATORS = ("and", "or", "xor", "lshift", "rshift")


@pytest.fixture(params=ENGINES)
def xp(request):
    return ml.array_api(request.param)


def convert(xp, key):
    if isinstance(key, tuple):
        return tuple(convert(xp, k) for k in key)
    return xp.asarray(key) if isinstance(key, np.ndarray) else key


def test_indexing_and_assignment(xp):
    for dtype in ("float64", "complex64"):
        values = VALUES.astype(dtype)
        for key in [*KEYS, VALUES > 4, (slice(None), np.array([True, False, True, True]))]:
            x = xp.asarray(values)
            np.testing.assert_array_equal(x[convert(xp, key)].numpy(), values[key])
            x[convert(xp, key)] = 7
            expected = values.copy()
            expected[key] = 7
            np.testing.assert_array_equal(x.numpy(), expected)


def test_no_array_changes_with_another(xp):
    source = VALUES.copy()
    x = xp.asarray(source)
    row, transposed, alias = x[0], x.T, xp.asarray(x, copy=False)
    x[0, 0] = 100.0
    x[0, 1] = xp.asarray(5.0)
    np.testing.assert_array_equal(row.numpy(), VALUES[0])
    np.testing.assert_array_equal(transposed.numpy(), VALUES.T)
    np.testing.assert_array_equal(source, VALUES)
    assert alias is x
    assert float(x[0, 0]) == 100.0
    view = x[0]
    x[0, 0] = 1.0
    assert float(view[0]) == 100.0


def test_conversions(xp):
    x = xp.asarray(VALUES)
    np.testing.assert_array_equal(np.asarray(x), VALUES)
    np.testing.assert_array_equal(np.from_dlpack(x), VALUES)
    np.testing.assert_array_equal(np.from_dlpack(xp.asarray(1j * VALUES)), 1j * VALUES)
    np.testing.assert_array_equal(xp.from_dlpack(VALUES).numpy(), VALUES)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(x)).numpy(), VALUES)
    assert (int(xp.asarray(3)), float(xp.asarray(2.5)), complex(xp.asarray(1j))) == (3, 2.5, 1j)
    assert bool(xp.asarray(True))
    assert range(5)[xp.asarray(2)] == 2
    assert x.__array_namespace__() is xp
    assert x.to_device(x.device) is x
    assert [row.shape for row in x] == [(4,)] * 3
    assert repr(xp.asarray([1.0])) == f"Array([1.], dtype=float64, engine='{xp.engine.backend.name}')"


def test_values_equal_on_every_engine(xp):
    x, z = xp.asarray(VALUES) / 7 - 0.5, xp.asarray(VALUES - 2j)
    reference = ml.array_api("numpy")
    y, w = reference.asarray(x.numpy()), reference.asarray(z.numpy())
    for name in ("exp", "tanh", "sqrt", "log10", "signbit", "sum", "argsort", "cumulative_prod", "mean", "var", "flip"):
        keywords = {"axis": 1} if name in ("argsort", "cumulative_prod", "flip") else {}
        actual, expected = (getattr(n, name)(a, **keywords).numpy() for n, a in ((xp, x), (reference, y)))
        np.testing.assert_allclose(actual, expected, rtol=1e-12, err_msg=name)
    for name in ("abs", "exp", "tanh", "acos", "sqrt", "prod"):
        actual, expected = (getattr(n, name)(a).numpy() for n, a in ((xp, z), (reference, w)))
        np.testing.assert_allclose(actual, expected, rtol=1e-11, err_msg=name)
    np.testing.assert_allclose((x @ x.T).numpy(), (y @ y.T).numpy(), rtol=1e-12)
    np.testing.assert_allclose(xp.fft.fft(z).numpy(), np.fft.fft(w.numpy()), rtol=1e-10)


def test_a_second_call_compiles_nothing(xp, monkeypatch):
    def calls(n):
        x = xp.asarray(np.ones((n, 3)))
        return xp.sum(xp.exp(x) * x + 2.0, axis=0)

    calls(3)
    built = []
    monkeypatch.setattr(type(xp.engine.backend), "build", lambda *_: built.append(1))
    calls(3)
    assert not built


def test_arrays_are_inputs_of_models(xp):
    model = ml.compile(Linear(4, 2), xp.engine.backend, shapes={"input": [3, 4]}, inference=True)
    params = model.randomize_params(seed=0)
    x = xp.asarray(VALUES, dtype=xp.float32)
    y = next(iter(model.evaluate(params, {"input": x}).values()))
    expected = next(iter(model.evaluate(params, {"input": VALUES.astype(np.float32)}).values()))
    z = xp.asarray(y)
    assert z.parts[0] is y
    np.testing.assert_array_equal(z.numpy(), model.backend.to_numpy(expected))


ERRORS = {
    "x[5]": "cannot index shape [3, 4]: index 5 is out of bounds for axis 0 with size 3",
    "x['a']":
        "an index cannot be 'a'\n"
        "  accepted: integers, slices, ..., None, arrays of integers or bools, tuples of these\n"
        "hint: xp.asarray(positions)",
    "x + b": "arrays of several engines",
    "xp.sin([1.0])": "'x' is a list, expected an array of this namespace\nhint: convert it: xp.asarray(x)",
    "xp.atan2(z, z)":
        "atan2 is not defined for complex128\n"
        "  accepted: dtypes of kind float\n"
        "hint: convert the operand: xp.astype(x, ...)",
    "x + xp.zeros((3, 3))": "shapes do not broadcast: [3, 4], [3, 3]\n  axis -1: 4 and 3",
    "xp.asarray([1], dtype=xp.int8) + 300":
        "the number 300 is outside of int8\n"
        "  accepted: -128 to 127\n"
        "hint: xp.asarray(300, dtype=xp.uint64)",
    "xp.astype(z, xp.float64)": "cannot convert complex128 to float64\nhint: xp.real(x), xp.imag(x) or xp.abs(x)",
    "xp.max(xp.zeros((0,)))": "max of no elements: axis 0 of [0] is empty",
    "float(x)": "float() is of an array without axes, got shape [3, 4]\nhint: x[0]",
    "xp.reshape(x, (5, 2))": "cannot reshape [3, 4] to [5, 2]\n  12 elements, 10 requested",
    "xp.squeeze(x, 0)": "axis 0 of shape [3, 4] has size 3, not 1\nhint: x[0]",
    "xp.asarray([[1], [2, 3]])":
        "cannot make an array of [[1], [2, 3]]\n"
        "  accepted: numbers, rows of equal length, arrays",
    "xp.arange(0, 3, 0)": "the step of arange is 0\nhint: step=1",
    "x @ x":
        "a product of shapes [3, 4] and [3, 4]\n"
        "  columns of the first: 4, rows of the second: 3\n"
        "hint: xp.matrix_transpose(x2)",
    "xp.fft.fft(xp.asarray([1]))": "the transform is not defined for int64\nhint: xp.astype(x, xp.float64)",
    "xp.asarray([1], device='gpu9')":
        "the engine numpy has no device 'gpu9'\n"
        "  accepted: Device(engine='numpy', name='cpu')\n"
        "hint: ml.array_api(backend) for a backend with another device, and xp.asarray(x)",
    "x.__array_namespace__(api_version='2099.1')":
        "the array API version is 2024.12, requested 2099.1\n"
        "hint: pass no api_version",
    "ml.array_api('nothing')": "unknown backend 'nothing'",
}  # fmt: skip


@pytest.mark.parametrize("source", ERRORS)
def test_errors(source):
    xp = ml.array_api("numpy")
    other = ml.array_api(ml.NumpyBackend())
    names = {
        "xp": xp,
        "ml": ml,
        "x": xp.asarray(VALUES),
        "z": xp.asarray([1j]),
        "b": other.asarray(VALUES),
        "math": math,
    }
    with pytest.raises(ml.MithrilError) as error:
        eval(source, names)
    assert str(error.value).startswith(ERRORS[source])


def test_an_unknown_name_has_a_proposal():
    with pytest.raises(
        AttributeError, match=r"^the array API standard 2024.12 has no name 'concatenate' \(did you mean concat\?\)$"
    ):
        ml.array_api("numpy").concatenate


def test_the_block_of_the_readme_runs():
    text = (Path(__file__).parents[1] / "README.md").read_text()
    exec(text.partition("```python\n")[2].partition("```")[0], {})


@pytest.mark.parametrize("name", [*OPERATORS, *COMPARISONS])
def test_operators_are_those_of_numpy(name):
    xp, symbol = ml.array_api("numpy"), f"__{name}__"
    values = np.array([[5, 2], [7, 3]]) if name in INTEGER_OPERATORS else np.array([[5.0, 2.0], [-7.0, 3.0]])
    operands = np.array([[2, 2], [1, 3]], values.dtype)
    x, y, number = xp.asarray(values), xp.asarray(operands), 2
    pairs = [(getattr(x, symbol)(y), getattr(values, symbol)(operands))]
    if name != "matmul":
        pairs.append((getattr(x, symbol)(number), getattr(values, symbol)(number)))
    if name in OPERATORS and name != "matmul":
        reflected = f"__r{name}__"
        pairs.append((getattr(x, reflected)(number), getattr(values, reflected)(number)))
    for actual, expected in pairs:
        np.testing.assert_array_equal(np.asarray(actual), expected)


def test_the_transposed_matrix_and_dtypes_of_numpy():
    xp = ml.array_api("numpy")
    x = xp.asarray([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    np.testing.assert_array_equal(np.asarray(x.T), np.asarray(x).T)
    with pytest.raises(ml.ShapeError, match="T is of a matrix"):
        _ = x[0].T
    assert xp.isdtype(np.float64, "real floating") and not xp.isdtype(np.dtype("int32"), "real floating")
