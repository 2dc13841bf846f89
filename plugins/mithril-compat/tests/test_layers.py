"""Layers of the predecessor, each compared with a formula in NumPy."""

import numpy as np
import pytest

import mithril as today
import mithril_compat as ml
from mithril_compat import models

pytestmark = pytest.mark.filterwarnings("ignore::mithril_compat.PredecessorWarning")
RNG = np.random.default_rng(3)


def normal(*shape):
    return RNG.normal(size=shape).astype("f4")


def positive(*shape):
    return np.abs(normal(*shape)) + np.float32(0.2)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def squares(a, b):
    return ((a[:, None] - b[None]) ** 2).sum(-1)


X, Y, IMAGE, LABELS = normal(4, 6), normal(4, 6), normal(2, 4, 6, 6), np.array([0, 2, 1, 2], "i4")
SCORES, SHARES, OTHERS = normal(4, 3), softmax(normal(4, 3)), softmax(normal(4, 3))
POINTS = normal(5, 2)
DISTANCES = np.abs(POINTS[:, None] - POINTS[None]).sum(-1)
_ROOT = normal(5, 5)
KERNEL = _ROOT @ _ROOT.T + 5 * np.eye(5, dtype="f4")
FACTOR = np.linalg.cholesky(KERNEL)
ONE = np.array(1.0, "f4")
ROWS = [  # constructor, inputs, output, its value
    ("Absolute()", {"input": X}, "output", np.abs(X)),
    ("Buffer()", {"input": X}, "output", X),
    ("Exponential()", {"input": X}, "output", np.exp(X)),
    ("Sine()", {"input": X}, "output", np.sin(X)),
    ("Cosine()", {"input": X}, "output", np.cos(X)),
    ("SiLU()", {"input": X}, "output", X / (1 + np.exp(-X))),
    ("Clamp(min_val=-0.5, max_val=0.5)", {"input": X}, "output", X.clip(-0.5, 0.5)),
    ("IsNan()", {"input": np.where(X > 0, np.nan, X)}, "output", X > 0),
    ("NanToNum()", {"input": np.where(X > 0, np.nan, X)}, "output", np.where(X > 0, 0, X)),
    ("ZerosLike()", {"input": X}, "output", 0 * X),
    ("StableReciprocal()", {"input": positive(4)}, "output", None),
    ("Log(robust=True)", {"input": positive(4)}, "output", None),
    ("MatrixMultiply()", {"left": X, "right": Y.T.copy()}, "output", X @ Y.T),
    ("CartesianDifference()", {"left": X, "right": Y}, "output", X[:, None] - Y[None]),
    ("Divide()", {"numerator": X, "denominator": positive(4, 6)}, "output", None),
    ("LogicalXOr()", {"left": X > 0, "right": Y > 0}, "output", (X > 0) ^ (Y > 0)),
    ("Where()", {"cond": X > 0, "input1": X, "input2": Y}, "output", np.where(X > 0, X, Y)),
    ("Variance(axis=1, correction=1.0)", {"input": X}, "output", X.var(1, ddof=1)),
    ("ArgMax()", {"input": X}, "output", X.argmax()),
    ("Flatten()", {"input": X}, "output", X.reshape(-1)),
    ("SwapAxes(0, 1)", {"input": X}, "output", X.T),
    ("BroadcastTo((2, 4, 6))", {"input": X}, "output", np.broadcast_to(X, (2, 4, 6))),
    ("Pad(((1, 0), (0, 2)))", {"input": X}, "output", np.pad(X, ((1, 0), (0, 2)))),
    ("PermuteTensor()", {"input": X, "indices": np.array([2, 0, 1], "i4")}, "output", X[[2, 0, 1]]),
    ("Trapezoid()", {"x": np.sort(X[0]), "y": Y[0]}, "output", np.trapezoid(Y[0], np.sort(X[0]))),
    ("SquaredError()", {"input": X, "target": Y}, "output", (X - Y) ** 2),
    ("AbsoluteError()", {"input": X, "target": Y}, "output", np.abs(X - Y)),
    ("QuantileLoss(0.25)", {"input": X, "target": Y}, "output", np.maximum((Y - X) * 0.25, (X - Y) * 0.75)),
    ("HingeLoss()", {"input": X, "target": Y}, "output", np.maximum(1 - X * Y, 0)),
    ("QuadHingeLoss()", {"input": X, "target": Y}, "output", np.maximum(1 - X * Y, 0) ** 2),
    ("KLDivergence()", {"input": SHARES, "target": OTHERS}, "output", OTHERS * np.log(OTHERS / SHARES)),
    ("CrossEntropy()", {"input": SCORES, "target": LABELS}, "output", -np.log(softmax(SCORES))[range(4), LABELS]),
    ("CrossEntropy('probs', categorical=False)", {"input": SHARES, "target": OTHERS}, "output",
     -(OTHERS * np.log(SHARES)).sum(1)),
    ("CrossEntropy(weights=[1.0, 2.0, 3.0])", {"input": SCORES, "target": LABELS}, "output",
     -np.log(softmax(SCORES))[range(4), LABELS] * (LABELS + 1)),
    ("BinaryCrossEntropy(pos_weight=2.0)", {"input": X, "target": (Y > 0).astype("f4")}, "output",
     np.where(Y > 0, 2 * np.logaddexp(0, -X), np.logaddexp(0, X))),
    ("BinaryCrossEntropy('probs')", {"input": SHARES, "target": (SCORES > 0).astype("f4")}, "output",
     -np.log(np.where(SCORES > 0, SHARES, 1 - SHARES))),
    ("MaxPool2D(2)", {"input": IMAGE}, "output", IMAGE.reshape(2, 4, 3, 2, 3, 2).max((3, 5))),
    ("AvgPool2D(2)", {"input": IMAGE}, "output", IMAGE.reshape(2, 4, 3, 2, 3, 2).mean((3, 5))),
    ("ScaledDotProduct(is_causal=False)", {"query": IMAGE, "key": IMAGE, "value": IMAGE}, "output",
     softmax(IMAGE @ IMAGE.swapaxes(-1, -2) / 6**0.5) @ IMAGE),
    ("L1()", {"input": X}, "output", np.abs(X).sum()),
    ("L2()", {"input": X}, "output", (X**2).sum() / 2),
    ("QuadraticFormRegularizer()", {"input": X[:1, :5], "kernel": KERNEL}, "output",
     X[:1, :5] @ KERNEL @ X[:1, :5].T / 2),
    ("RBFKernel()", {"input1": X, "input2": Y, "l_scale": ONE[None] * 2, "sigma": ONE[None] * 3}, "output",
     4 * np.exp(-squares(X, Y) / 18)),
    ("PolynomialKernel()", {"input1": np.abs(X), "input2": np.abs(Y), "poly_coef": ONE, "degree": 2 * ONE}, "output",
     (np.abs(X) @ np.abs(Y).T + 1) ** 2),
    ("PolynomialFeatures(2)", {"input": POINTS}, "output",
     np.stack([*POINTS.T, POINTS[:, 0] ** 2, POINTS[:, 0] * POINTS[:, 1], POINTS[:, 1] ** 2], 1)),
    ("NormModifier()", {"input": ONE}, "output", 1.0),
    ("DistanceMatrix()", {"left": X, "right": Y, "norm": 2 * ONE}, "output", squares(X, Y)),
    ("MDSCore()", {"distances": DISTANCES, "pred_distances": 2 * DISTANCES, "norm": ONE}, "output", 1.0),
    ("MDS(2)", {"input": DISTANCES, "coords": POINTS, "norm": ONE}, "output", 0.0),
    ("GPRAlpha()", {"label_mu_diff": POINTS[:, :1], "L": FACTOR, "K_term": KERNEL}, "output",
     np.linalg.solve(KERNEL, POINTS[:, :1])),
    ("GPRVOuter()", {"K": KERNEL, "L": FACTOR, "K_term": KERNEL}, "output", KERNEL),
    ("GPRLoss()", {"labels": POINTS[:, :1], "mu": 0 * POINTS[:, :1], "L": FACTOR, "K_term": KERNEL,
                   "alpha": POINTS[:, :1]}, "output",
     (POINTS[:, 0] ** 2).sum() / 2 + np.log(np.diag(FACTOR)).sum() + 2.5 * np.log(2 * np.pi)),
    ("GaussProcessRegressionCore()", {"s": ONE[None], "k": KERNEL, "k_star": KERNEL, "mu": 0 * POINTS[:, :1],
                                      "label": POINTS[:, :1]}, "prediction",
     KERNEL @ np.linalg.solve(KERNEL + np.eye(5), POINTS[:, :1])),
    ("Accuracy(is_label_one_hot=False)", {"pred": SCORES, "label": LABELS}, "output",
     (SCORES.argmax(1) == LABELS).mean()),
    ("Precision(is_label_one_hot=False)", {"pred": SCORES, "label": LABELS}, "output",
     (SCORES.argmax(1) == LABELS).mean()),
    ("AUC(1, is_label_one_hot=False)", {"pred": np.array([0.1, 0.4, 0.8, 0.9], "f4"),
                                        "label": np.array([1, 1, 0, 0], "i4")}, "output", 1.0),
]  # fmt: skip
ELEMENTWISE = {
    "StableReciprocal()": lambda input: 1 / input,
    "Log(robust=True)": lambda input: np.log(input),
    "Divide()": lambda numerator, denominator: numerator / denominator,
}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_values(row):
    constructor, inputs, output, expected = row
    layer = eval(constructor, dict(vars(models)))
    types = {name: x.dtype for name, x in inputs.items() if x.dtype.kind != "f"}
    shapes = {name: x.shape for name, x in inputs.items()}
    compiled = ml.compile(layer, ml.NumpyBackend(), data_keys=set(inputs), shapes=shapes, types=types)
    result = compiled.evaluate({}, inputs)[output]
    expected = ELEMENTWISE[constructor](**inputs) if expected is None else expected
    assert np.shape(result) == np.shape(expected)
    np.testing.assert_allclose(np.asarray(result, "f8"), np.asarray(expected, "f8"), rtol=1e-3, atol=1e-4)


def test_robust_functions_have_finite_gradients_at_zero():
    for name in ("Log", "Sqrt"):
        compiled = ml.compile(
            getattr(models, name)(robust=True), ml.NumpyBackend(), trainable_keys={"input"}, shapes={"input": [2]}
        )
        gradients = compiled.evaluate({"input": np.zeros(2, "f4")}, {}, output_gradients={"output": np.ones(2, "f4")})[
            1
        ]
        assert np.isfinite(gradients["input"]).all()


def test_neighbors_have_the_perplexity():
    squared = squares(POINTS, POINTS)
    compiled = ml.compile(
        models.TsnePJoint(),
        ml.NumpyBackend(),
        data_keys={"squared_distances", "target_perplexity"},
        shapes={"squared_distances": [5, 5], "target_perplexity": []},
    )
    joint = compiled.evaluate({}, {"squared_distances": squared, "target_perplexity": np.array(2.0, "f4")})["output"]
    np.testing.assert_allclose(joint, joint.T, rtol=1e-5)
    np.testing.assert_allclose(joint.sum(), 1.0, rtol=1e-3)


def test_batch_statistics_are_states():
    layer = models.BatchNorm2D(4, inference=False, use_scale=False, use_bias=False)
    compiled = ml.compile(layer, ml.NumpyBackend(), data_keys={"input"}, shapes={"input": IMAGE.shape})
    outputs, state = compiled.evaluate({}, {"input": IMAGE}, state=compiled.initial_state_dict)
    assert abs(outputs["output"].mean()) < 1e-5
    np.testing.assert_allclose(state["running_mean"], 0.1 * IMAGE.mean((0, 2, 3)), rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(state["running_var"], 0.9 + 0.1 * IMAGE.var((0, 2, 3), ddof=1), rtol=1e-4)


def test_sequences_of_different_lengths():
    backend, sizes = ml.NumpyBackend(), (5, 3, 2)
    inputs = {f"input{k}": normal(n, 1, 4) for k, n in enumerate(sizes)} | {"initial_hidden": normal(5, 1, 6)}
    shapes = {name: x.shape for name, x in inputs.items()} | {"w_ho": [2, 6]}
    model = models.ManyToOne(models.RNNCell(), 3)
    compiled = ml.compile(model, backend, data_keys=set(inputs), shapes=shapes)
    params = compiled.randomize_params()
    hidden = inputs["initial_hidden"]
    outputs = compiled.evaluate(params, inputs)
    for k, rows in enumerate(sizes):
        step = inputs[f"input{k}"] @ params["w_ih"].T + params["bias_h"] + hidden[:rows] @ params["w_hh"].T
        hidden = np.tanh(step)
        expected = hidden @ params["w_ho"].T + params["bias_o"]
        np.testing.assert_allclose(outputs[f"output{k}"], expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["CustomPrimitiveModel", "PrimitiveModel"])
def test_names_that_are_not_offered_say_so(name):
    with pytest.raises(AttributeError, match=f"'{name}' of the predecessor is not offered; declare an operation"):
        getattr(models, name)


@pytest.mark.parametrize("key", ["relu", "sigmoid", "softplus", "tanh"])
def test_an_activation_is_the_layer_of_its_formula_key(key):
    x = np.array([[-2.0, 0.5, 3.0]], np.float32)
    layers = models.Activation(key), getattr(models, key.capitalize())()
    options = {"data_keys": {"input"}, "shapes": {"input": [1, 3]}, "inference": True}
    first, second = (
        ml.compile(layer, ml.NumpyBackend(), **options).evaluate({}, {"input": x})["output"] for layer in layers
    )
    np.testing.assert_array_equal(first, second)


def test_an_unknown_formula_key_is_an_error():
    message = "Activation has no formula key 'swish'\n  accepted: relu, sigmoid, softplus, tanh, silu, sin, cos"
    with pytest.raises(today.MithrilError) as error:
        ml.compile(models.Activation("swish"), ml.NumpyBackend(), data_keys={"input"}, shapes={"input": [3]})
    assert message in str(error.value)


@pytest.mark.parametrize("constructor", ["Unique()", "TensorToList()"])
def test_results_that_depend_on_elements_are_refused(constructor):
    layer = eval(constructor, dict(vars(models)))
    with pytest.raises(today.MithrilError, match=constructor.strip("()")):
        ml.compile(layer, ml.NumpyBackend(), data_keys={"input"}, shapes={"input": [3]})


def test_arrays_of_backends():
    backend = ml.NumpyBackend()
    backend.set_seed(1)
    assert backend.ones(2, 3).shape == backend.ones([2, 3]).shape == backend.zeros((2, 3)).shape == (2, 3)
    assert backend.ones((2, 3), "int32").dtype == np.int32  # as today
    assert backend.randn(4, 2).shape == backend.rand_uniform(0, 1, 4, 2).shape == (4, 2)
    assert set(backend.randint(2, 4, 50).tolist()) == {2, 3}
    assert backend.stack([backend.arange(3), backend.arange(3)]).shape == (2, 3)
    assert backend.cat([backend.ones(2), backend.zeros(1)]).tolist() == [1, 1, 0]
    np.testing.assert_allclose(backend.softmax(backend.zeros(4)), 0.25)
    assert backend.topk(backend.array([1.0, 3.0, 2.0]), 2).tolist() == [3, 2]
