"""Models of scikit-learn, exported by skl2onnx: equal to scikit-learn and to onnxruntime on the same file."""

import warnings

import numpy as np
import onnx.helper as h
import pytest

import mithril as ml

skl2onnx = pytest.importorskip("skl2onnx")
ort = pytest.importorskip("onnxruntime")

from sklearn import (  # noqa: E402
    cluster,
    decomposition,
    ensemble,
    linear_model,
    naive_bayes,
    neighbors,
    neural_network,
    pipeline,
    preprocessing,
    svm,
    tree,
)
from sklearn.impute import SimpleImputer  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
rng = np.random.default_rng(0)
X = rng.normal(size=(160, 5)).astype(np.float32)
X64 = X.astype(np.float64)
BINARY = (X[:, 0] + X[:, 1] * X[:, 2] > 0).astype(int)
THREE = (X[:, 0] > 0.5).astype(int) + (X[:, 1] > 0).astype(int)
TARGET = X[:, 0] * 2 + np.sin(X[:, 1])
TARGETS = np.stack([TARGET, X[:, 2] ** 2], 1)

CLASSIFIERS = {
    "logistic": lambda: linear_model.LogisticRegression(),
    "ridge": lambda: linear_model.RidgeClassifier(),
    "sgd": lambda: linear_model.SGDClassifier(loss="log_loss", random_state=0),
    "linear svm": lambda: svm.LinearSVC(),
    "svm": lambda: svm.SVC(),
    "svm with probabilities": lambda: svm.SVC(probability=True, random_state=0),
    "svm of degree 2": lambda: svm.SVC(kernel="poly", degree=2),
    "perceptrons": lambda: neural_network.MLPClassifier((8,), max_iter=30, random_state=0),
    "tree": lambda: tree.DecisionTreeClassifier(max_depth=6, random_state=0),
    "forest": lambda: ensemble.RandomForestClassifier(12, random_state=0),
    "extra trees": lambda: ensemble.ExtraTreesClassifier(8, random_state=0),
    "gradient boosting": lambda: ensemble.GradientBoostingClassifier(n_estimators=8, random_state=0),
    "neighbors": lambda: neighbors.KNeighborsClassifier(3),
    "naive bayes": lambda: naive_bayes.GaussianNB(),
    "scaled": lambda: pipeline.make_pipeline(preprocessing.StandardScaler(), linear_model.LogisticRegression()),
    "adaptive boosting": lambda: ensemble.AdaBoostClassifier(n_estimators=5, random_state=0),
    "votes": lambda: ensemble.VotingClassifier(
        [("a", linear_model.LogisticRegression()), ("b", tree.DecisionTreeClassifier(max_depth=3))],
        voting="soft",
        flatten_transform=False,
    ),
}
REGRESSORS = {
    "linear": lambda: linear_model.LinearRegression(),
    "lasso": lambda: linear_model.Lasso(0.01),
    "tree": lambda: tree.DecisionTreeRegressor(max_depth=7, random_state=0),
    "forest": lambda: ensemble.RandomForestRegressor(10, random_state=0),
}
SINGLE = {
    "support vectors": lambda: svm.SVR(),
    "gradient boosting": lambda: ensemble.GradientBoostingRegressor(n_estimators=10, random_state=0),
}
PREPARATIONS = {
    "scaling": lambda: preprocessing.StandardScaler(),
    "range": lambda: preprocessing.MinMaxScaler(),
    "norm": lambda: preprocessing.Normalizer(),
    "binary": lambda: preprocessing.Binarizer(threshold=0.3),
    "powers": lambda: preprocessing.PolynomialFeatures(2),
    "bins": lambda: preprocessing.KBinsDiscretizer(4, encode="ordinal", quantile_method="averaged_inverted_cdf"),
    "components": lambda: decomposition.PCA(3),
    "clusters": lambda: cluster.KMeans(3, random_state=0, n_init=1),
}


def exported(model, x=X, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return skl2onnx.to_onnx(model, x[:1], **options)


def check(proto, x, tolerance=1e-5, backend=None):
    """Compare with onnxruntime on the same file and return our outputs."""
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    expected = session.run(None, {session.get_inputs()[0].name: x})
    model = ml.from_onnx(proto)
    compiled = ml.compile(model, backend or ml.NumpyBackend(), inference=True)
    results = list(compiled.evaluate(compiled.randomize_params(), {model.inputs[0]: x}).values())
    for result, reference in zip(results, expected, strict=True):
        if isinstance(reference, list):  # a map of each row
            reference = np.asarray([[row[k] for k in row] for row in reference])
        np.testing.assert_allclose(result, reference, rtol=tolerance, atol=tolerance)
        assert np.asarray(result).dtype == reference.dtype or reference.dtype == np.float64
    return results


@pytest.mark.parametrize("name", CLASSIFIERS)
@pytest.mark.parametrize("y", [BINARY, THREE], ids=["two", "three"])
def test_classifiers_equal_scikit_learn(name, y):
    model = CLASSIFIERS[name]().fit(X, y)
    labels, scores = check(exported(model), X)
    assert (labels == model.predict(X)).mean() > 0.98  # ties of float32 against float64
    if hasattr(model, "predict_proba"):
        np.testing.assert_allclose(scores, model.predict_proba(X), atol=2e-2 if "svm" in name else 1e-5)


@pytest.mark.parametrize("name", [*REGRESSORS, *SINGLE])
def test_regressors_equal_scikit_learn(name):
    for y in (TARGET, TARGETS) if name in REGRESSORS else (TARGET,):
        model = {**REGRESSORS, **SINGLE}[name]().fit(X, y)
        (result,) = check(exported(model), X, 1e-4)
        np.testing.assert_allclose(result.reshape(y.shape), model.predict(X), atol=1e-3)


@pytest.mark.parametrize("name", PREPARATIONS)
def test_preparations_equal_scikit_learn(name):
    model = PREPARATIONS[name]().fit(X)
    results = check(exported(model), X)
    np.testing.assert_allclose(results[-1], model.transform(X), atol=1e-5)


# -- what scikit-learn does not emit ------------------------------------------------------------------------------
def learned_model(op, attributes, inputs, outputs, opset=5):
    """Return a model of one node of ai.onnx.ml; inputs and outputs are (name, element type, shape)."""
    node = h.make_node(op, [n for n, _, _ in inputs], [n for n, _, _ in outputs], domain="ai.onnx.ml", **attributes)
    graph = h.make_graph(
        [node],
        "g",
        [h.make_tensor_value_info(*i) for i in inputs],
        [h.make_tensor_value_info(*o) for o in outputs],
    )
    opsets = [h.make_opsetid("", 20), h.make_opsetid("ai.onnx.ml", opset)]
    return h.make_model(graph, opset_imports=opsets, ir_version=9)


MODES = ["BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ"]


def random_trees(seed, trees, modes, targets=2, columns=5, depth=4):
    """Return attributes of TreeEnsembleRegressor for trees of random form, with values of x as thresholds."""
    draw = np.random.default_rng(seed)
    nodes = {k: [] for k in ("treeids", "nodeids", "featureids", "values", "modes", "truenodeids", "falsenodeids")}
    nodes["missing_value_tracks_true"] = []
    leaves = {"treeids": [], "nodeids": [], "ids": [], "weights": []}

    def grow(number_of_tree, numbers, level):
        number = next(numbers)
        row = {
            "treeids": number_of_tree, "nodeids": number, "featureids": 0, "values": 0.0, "modes": "LEAF",
            "truenodeids": 0, "falsenodeids": 0, "missing_value_tracks_true": 0,
        }  # fmt: skip
        position = len(nodes["treeids"])
        for name, value in row.items():
            nodes[name].append(value)
        if level == depth or (level and draw.random() < 0.2):
            for target in range(targets):
                if draw.random() < 0.7:
                    for name, value in zip(leaves, (number_of_tree, number, target, draw.normal()), strict=True):
                        leaves[name].append(value)
            return number
        nodes["featureids"][position] = int(draw.integers(columns))
        nodes["values"][position] = float(np.float32(draw.integers(-1, 2)))
        nodes["modes"][position] = str(draw.choice(modes))
        nodes["missing_value_tracks_true"][position] = int(draw.integers(2))
        nodes["truenodeids"][position] = grow(number_of_tree, numbers, level + 1)
        nodes["falsenodeids"][position] = grow(number_of_tree, numbers, level + 1)
        return number

    for k in range(trees):
        grow(k, iter(range(1000)), 0)
    return {f"nodes_{k}": v for k, v in nodes.items()} | {f"target_{k}": v for k, v in leaves.items()}


WHOLE = np.random.default_rng(1).integers(-2, 3, (40, 5)).astype(np.float32)
WHOLE[WHOLE == 2] = np.nan


@pytest.mark.parametrize("aggregate", ["SUM", "AVERAGE", "MIN", "MAX"])
@pytest.mark.parametrize("modes", [MODES[:1], MODES[2:3], MODES], ids=["leq", "gte", "mixed"])
def test_trees_of_any_form_equal_onnxruntime(aggregate, modes):
    attributes = random_trees(3, 6, modes) | {
        "n_targets": 2, "aggregate_function": aggregate, "base_values": [0.5, -1.0],
    }  # fmt: skip
    proto = learned_model("TreeEnsembleRegressor", attributes, [("x", 1, ["n", 5])], [("y", 1, ["n", 2])], 3)
    check(proto, WHOLE)


@pytest.mark.parametrize("transform", ["NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT"])
def test_transformations_of_scores_equal_onnxruntime(transform):
    attributes = random_trees(3, 1, MODES[:1], targets=3) | {"n_targets": 3, "post_transform": transform}
    if transform == "PROBIT":  # the inverse of a probability
        attributes["target_weights"] = [1 / (1 + np.exp(-w)) for w in attributes["target_weights"]]
    proto = learned_model("TreeEnsembleRegressor", attributes, [("x", 1, ["n", 5])], [("y", 1, ["n", 3])], 3)
    session = ort.InferenceSession(proto.SerializeToString())
    expected = session.run(None, {"x": WHOLE})[0]
    result = ml.compile(ml.from_onnx(proto), "numpy", inference=True)({"x": WHOLE})["y"]
    finite = np.isfinite(expected)
    assert finite.mean() > 0.5
    np.testing.assert_allclose(np.asarray(result)[finite], expected[finite], rtol=2e-3, atol=2e-3)


def test_labels_that_are_strings():
    model = ensemble.RandomForestClassifier(3, random_state=0).fit(X, np.asarray(["no", "yes"])[BINARY])
    proto = exported(model)
    with pytest.raises(ml.UnsupportedError, match=r"the labels are strings \('no', 'yes'\)"):
        ml.compile(ml.from_onnx(proto), "numpy", inference=True)({"X": X})
    scores = ml.compile(ml.from_onnx(proto, outputs=["probabilities"]), "numpy", inference=True)({"X": X})
    np.testing.assert_allclose(next(iter(scores.values())), model.predict_proba(X), atol=1e-6)


ENCODERS = {
    "integers": ({"keys_int64s": [3, 1, 7], "values_floats": [0.5, 1.5, 2.5], "default_float": -1.0}, 7, 1),
    "floats": ({"keys_floats": [1.0, 0.0, float("nan")], "values_int64s": [5, 6, 7], "default_int64": 9}, 1, 7),
}


@pytest.mark.parametrize("name", ENCODERS)
def test_label_encoder(name):
    attributes, source, result = ENCODERS[name]
    x = np.asarray([[1, 2, 3], [7, 0, 1]], np.int64)
    if source == 1:
        x = np.where(x == 2, np.nan, x).astype(np.float32)
    proto = learned_model("LabelEncoder", attributes, [("x", source, [2, 3])], [("y", result, [2, 3])], 4)
    check(proto, x)


def test_missing_values_are_imputed():
    x = WHOLE.copy()
    check(exported(SimpleImputer().fit(x), x), x)


def test_one_hot():
    x = np.asarray([[3], [1], [9]], np.int64)
    attributes = {"cats_int64s": [1, 3, 5], "zeros": 1}
    check(learned_model("OneHotEncoder", attributes, [("x", 7, [3, 1])], [("y", 1, [3, 1, 3])], 1), x)


def test_feature_vectorizer():
    inputs = [("a", 1, [2, 3]), ("b", 7, [2, 2])]
    proto = learned_model("FeatureVectorizer", {"inputdimensions": [2, 4]}, inputs, [("y", 1, [2, 6])], 1)
    arrays = {"a": np.asarray([[1, 2, 3], [4, 5, 6]], np.float32), "b": np.asarray([[7, 8], [9, 10]], np.int64)}
    (result,) = ml.compile(ml.from_onnx(proto), "numpy", inference=True)(arrays).values()
    np.testing.assert_array_equal(result, [[1, 2, 7, 8, 0, 0], [4, 5, 9, 10, 0, 0]])


BROKEN = {
    "below itself": ({"nodes_truenodeids": [0, 0, 0]}, "no root|below itself"),
    "a missing node": ({"nodes_truenodeids": [9, 0, 0]}, "cannot import"),
    "a missing column": ({"nodes_featureids": [7, 0, 0]}, "tests column 7, the input has 5"),
    "a missing target": ({"target_ids": [0, 4]}, "the target 4 of 1"),
    "an unknown mode": ({"nodes_modes": ["BRANCH_X", "LEAF", "LEAF"]}, "cannot import"),
    "fewer values": ({"nodes_modes": ["BRANCH_LEQ", "LEAF"]}, "cannot import"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_damaged_trees(name):
    change, message = BROKEN[name]
    attributes = {
        "nodes_treeids": [0, 0, 0], "nodes_nodeids": [0, 1, 2], "nodes_featureids": [0, 0, 0],
        "nodes_values": [0.0, 0.0, 0.0], "nodes_modes": ["BRANCH_LEQ", "LEAF", "LEAF"],
        "nodes_truenodeids": [1, 0, 0], "nodes_falsenodeids": [2, 0, 0], "target_treeids": [0, 0],
        "target_nodeids": [1, 2], "target_ids": [0, 0], "target_weights": [1.0, 2.0], "n_targets": 1,
    }  # fmt: skip
    proto = learned_model("TreeEnsembleRegressor", attributes | change, [("x", 1, ["n", 5])], [("y", 1, ["n", 1])], 3)
    with pytest.raises(ml.MithrilError, match=message):
        ml.compile(ml.from_onnx(proto), "numpy", inference=True)({"x": X})
