"""The eager arrays of mithril-array: the official suite, estimators of scikit-learn, and the cost of a call.

``python benchmarks/bench_array_api.py suite FOLDER ENGINE`` runs the suite of the array API standard in a folder of
``git clone --recursive https://github.com/data-apis/array-api-tests``, with its requirements installed.
``... calls ENGINE ...`` prints microseconds of processor time of a call after the first one, next to those of NumPy
and array-api-strict, and milliseconds of the first one. ``... scikit-learn ENGINE ...`` compares estimators and metrics
with their results for NumPy arrays.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

os.environ["SCIPY_ARRAY_API"] = "1"
EXAMPLES, CALLS, SIZE = 20, 2000, 1000


def suite(folder: str, engine: str, *options: str) -> int:
    """Run the official suite on an engine."""
    module = f"exec('import mithril as ml; xp = ml.array_api(\"{engine}\")')"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "array_api_tests",
        f"--max-examples={EXAMPLES}",
        "--disable-deadline",
    ]
    environment = {**os.environ, "ARRAY_API_TESTS_MODULE": module}
    return subprocess.run(
        [*command, "--hypothesis-seed=0", *options], cwd=folder, env=environment, check=False
    ).returncode


FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "x + x": lambda xp, x: x + x,
    "x * 2.0": lambda xp, x: x * 2.0,
    "sum(x)": lambda xp, x: xp.sum(x),
    "sqrt(x)": lambda xp, x: xp.sqrt(x),
    "x[0]": lambda xp, x: x[0],
    "x @ x": lambda xp, x: x @ x,
    "reshape(x)": lambda xp, x: xp.reshape(x, (-1, 1)),
}


def calls(*engines: str) -> int:
    """Print the cost of the first call and of later ones."""
    import array_api_strict
    import numpy as np

    import mithril as ml

    namespaces: dict[str, Any] = {"numpy itself": np, "array-api-strict": array_api_strict}
    namespaces |= {engine: ml.array_api(engine) for engine in engines}
    for label, function in FUNCTIONS.items():
        cells = []
        for name, xp in namespaces.items():
            x = xp.asarray(np.ones(SIZE))
            start = time.perf_counter()
            function(xp, x)
            first = time.perf_counter() - start
            rounds = []
            for _ in range(5):
                start = time.process_time()
                for _ in range(CALLS // 5):
                    function(xp, x)
                rounds.append((time.process_time() - start) / (CALLS // 5))
            cells.append(f"{name} {min(rounds) * 1e6:.1f} us (first {first * 1e3:.1f} ms)")
        print(f"{label:10}", ", ".join(cells))
    return 0


def estimators() -> list[tuple[Any, str]]:
    """Return estimators that dispatch, and the name of their target."""
    from sklearn import decomposition, discriminant_analysis, linear_model, mixture, naive_bayes, preprocessing

    plain = [
        *(preprocessing.StandardScaler(), preprocessing.MinMaxScaler(), preprocessing.MaxAbsScaler()),
        *(preprocessing.Normalizer(), preprocessing.Binarizer(), preprocessing.PolynomialFeatures(2)),
        *(decomposition.PCA(2, svd_solver="full"), decomposition.PCA(2, svd_solver="covariance_eigh")),
        mixture.GaussianMixture(2, init_params="random", random_state=0),
    ]
    classes = [
        *(discriminant_analysis.LinearDiscriminantAnalysis(), linear_model.RidgeClassifier(solver="svd")),
        *(linear_model.LogisticRegression(), naive_bayes.GaussianNB()),
    ]
    numbers = [linear_model.Ridge(solver="svd"), linear_model.RidgeCV()]
    return [(e, "") for e in plain] + [(e, "classes") for e in classes] + [(e, "numbers") for e in numbers]


METRICS = {
    "classes": "accuracy_score f1_score precision_score recall_score jaccard_score balanced_accuracy_score "
    "confusion_matrix hamming_loss cohen_kappa_score zero_one_loss",
    "numbers": "mean_squared_error mean_absolute_error r2_score explained_variance_score max_error "
    "median_absolute_error root_mean_squared_error mean_absolute_percentage_error mean_pinball_loss",
    "scores": "log_loss brier_score_loss average_precision_score",
}


def scikit_learn(*engines: str) -> int:
    """Compare estimators and metrics on arrays of an engine with those on NumPy arrays."""
    import numpy as np
    import sklearn
    from sklearn import metrics
    from sklearn.base import clone

    import mithril as ml

    warnings.simplefilter("ignore")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(80, 5))
    targets = {"classes": (x[:, 0] > 0).astype(np.int64), "numbers": x @ rng.normal(size=5)}
    guesses = {
        "classes": (x[:, 0] + x[:, 1] > 0).astype(np.int64),
        "numbers": targets["numbers"] + x[:, 1],
        "scores": 1 / (1 + np.exp(-x[:, 0])),
    }
    failed = 0
    for engine in engines:
        xp = ml.array_api(engine)

        def compare(label: str, run: Callable[[Callable[[Any], Any]], Any], xp: Any = xp, engine: str = engine) -> bool:
            expected = np.asarray(run(lambda a: a))
            with sklearn.config_context(array_api_dispatch=True):
                actual = np.asarray(run(xp.asarray))
            equal = np.allclose(expected, actual, rtol=1e-6, atol=1e-8)
            print(f"{engine} {label:60} {'equal' if equal else 'DIFFERENT'}")
            return not equal

        for estimator, target in estimators():

            def fitted(convert: Callable[[Any], Any], estimator: Any = estimator, target: str = target) -> Any:
                data = convert(x)
                model = clone(estimator).fit(data, *([convert(targets[target])] if target else []))
                return getattr(model, "predict" if hasattr(model, "predict") else "transform")(data)

            failed += compare(repr(estimator), fitted)
        for kind, names in METRICS.items():
            truth = targets["classes" if kind == "scores" else kind]
            for name in names.split():
                function = getattr(metrics, name)
                failed += compare(name, lambda c, f=function, t=truth, g=guesses[kind]: f(c(t), c(g)))
    return failed


if __name__ == "__main__":
    sys.exit({"suite": suite, "calls": calls, "scikit-learn": scikit_learn}[sys.argv[1]](*sys.argv[2:]))
