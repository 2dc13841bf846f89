"""scikit-learn's own checks of estimators, and the wrappers in a pipeline, a search and a pickle."""

import pickle
import subprocess
import sys

import numpy as np
import pytest
from small import X, Y

import mithril as ml

pytest.importorskip("sklearn")

from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks


@parametrize_with_checks([ml.Classifier(epochs=60, random_state=0), ml.Regressor(epochs=60, random_state=0)])
def test_checks_of_scikit_learn(estimator, check):
    check(estimator)


def wide(features, outputs):
    return ml.models.MLP([16, outputs])


def test_searches_and_pipelines():
    search = GridSearchCV(
        make_pipeline(StandardScaler(), ml.Classifier(wide, epochs=10, backend="numpy")),
        {"classifier__batch_size": [8, 96], "classifier__optimizer": [ml.Adam(1e-2)]},
        cv=2,
    )
    search.fit(X, np.array(["a", "b", "c"])[Y])
    assert search.best_params_["classifier__batch_size"] == 8
    assert set(search.predict(X)) <= {"a", "b", "c"}
    assert cross_val_score(ml.Regressor(epochs=30), X, X.sum(1), cv=2).min() > 0.8


def test_options_of_the_trainer_and_of_fit():
    subject = ml.Classifier(epochs=3, options={"metrics": "accuracy", "clip_norm": 1.0}, random_state=0)
    subject.fit(X, Y, validation_data=(X.astype(np.float64), Y), class_weight={0: 2.0})
    assert subject.history_.columns == ["loss", "gradient_norm", "accuracy", "val_loss", "val_accuracy"]
    np.testing.assert_allclose(subject.predict_proba(X).sum(1), 1.0)


@pytest.mark.parametrize("targets", [X[:, 0], X[:, :2]])
def test_pickles_predict_the_same(targets):
    subject = ml.Regressor(wide, epochs=2, random_state=0).fit(X, targets)
    other = pickle.loads(pickle.dumps(subject))
    assert subject.predict(X).shape == targets.shape
    np.testing.assert_array_equal(other.predict(X), subject.predict(X))


def test_without_scikit_learn_the_remedy_is_named():
    code = """
import sys
sys.modules["sklearn"] = None
import mithril as ml
assert ml.Classifier.__doc__
try:
    ml.Regressor()
except ml.MithrilError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "ml.Regressor needs scikit-learn" in done.stdout
    assert 'hint: pip install "mithril-train[sklearn]"' in done.stdout
