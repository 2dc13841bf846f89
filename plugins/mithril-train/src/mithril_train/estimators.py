"""Estimators of scikit-learn: ``ml.Classifier`` and ``ml.Regressor`` train a model by ``fit`` and predict arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mithril.compiler import compile as compile_model
from mithril.graph import PluginError
from mithril.models import MLP, Layer
from mithril_train.loop.trainer import Trainer
from mithril_train.optim.optimizers import Adam

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data
except ImportError as error:  # the classes exist, for their documentation, but cannot be used
    MISSING: ImportError | None = error
    BaseEstimator, ClassifierMixin, RegressorMixin = (type(name, (), {}) for name in ("Base", "Classify", "Regress"))
else:
    MISSING = None

Array = np.ndarray[Any, Any]


class _Estimator(BaseEstimator):  # type: ignore[misc]
    """The part that classifiers and regressors share."""

    loss = ""

    def __init__(
        self,
        model: Any = None,
        *,
        optimizer: Any = None,
        epochs: int = 100,
        batch_size: int = 32,
        backend: Any = None,
        options: Mapping[str, Any] | None = None,
        random_state: Any = None,
    ) -> None:
        if MISSING is not None:
            raise PluginError(
                f"ml.{type(self).__name__} needs scikit-learn",
                facts=[str(MISSING)],
                hint='pip install "mithril-train[sklearn]"',
            )
        self.model = model
        self.optimizer = optimizer
        self.epochs = epochs
        self.batch_size = batch_size
        self.backend = backend
        self.options = options
        self.random_state = random_state

    def _train(self, x: Array, y: Array, outputs: int, options: Mapping[str, Any]) -> None:
        compiled = self._compile(x.shape[1], outputs)
        trainer = Trainer(
            compiled,
            Adam(1e-2) if self.optimizer is None else self.optimizer,
            seed=int(check_random_state(self.random_state).randint(2**31 - 1)),
            **{"progress": False, "loss": self.loss, **(self.options or {})},
        )
        trainer.fit(x, y, self.epochs, batch_size=self.batch_size, **options)
        self.history_ = trainer.history
        self.n_outputs_ = outputs
        self.params_ = {n: trainer.to_numpy(a) for n, a in trainer.params.items()}
        self.state_ = {n: trainer.to_numpy(a) for n, a in trainer.engine.model_states().items()}
        self._compiled = compiled

    def _compile(self, features: int, outputs: int) -> Any:
        """Compile the model; a function of the numbers of features and outputs builds one that fits the data."""
        model = MLP([32, outputs]) if self.model is None else self.model
        if not isinstance(model, Layer):
            model = model(features, outputs)
        if self.backend is not None:
            return compile_model(model, self.backend)
        from mithril.plugins import backend_class

        return compile_model(model, backend_class("numpy")(dtype="float64"))

    def _outputs(self, x: Any) -> Array:
        check_is_fitted(self)
        x = validate_data(self, x, reset=False, dtype="numeric")
        if self._compiled is None:  # after unpickling
            self._compiled = self._compile(self.n_features_in_, self.n_outputs_)
        backend = self._compiled.backend
        arrays = [{n: backend.array(a) for n, a in part.items()} for part in (self.params_, self.state_)]
        name = next(iter(self._compiled.specs))
        values = self._compiled.evaluate(arrays[0], {name: self._numbers(x)}, state=arrays[1], training=False)[0]
        return np.asarray(backend.to_numpy(next(iter(values.values()))), np.float64)

    def _numbers(self, x: Array) -> Array:
        """Return features in the precision of the computation."""
        return np.asarray(x, np.float64 if self.backend is None else np.float32)

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = dict(super().__getstate__())
        return {n: (None if n == "_compiled" else v) for n, v in state.items()}


class Classifier(ClassifierMixin, _Estimator):  # type: ignore[misc]
    """A classifier of scikit-learn: ``Classifier(model, epochs=20).fit(x, y).predict(x)``.

    ``model`` is a layer that returns logits, or a function of the numbers of features and classes that returns one; the
    default is a small perceptron. ``optimizer`` and ``backend`` are those of ``ml.Trainer`` (default: Adam, NumPy in
    double precision), ``options`` its other arguments. Options of ``fit`` are those of ``Trainer.fit``. Grid searches,
    pipelines and cross-validation clone, pickle and fit it like any other estimator.
    """

    loss = "cross_entropy"

    def fit(self, X: Any, y: Any, **options: Any) -> Classifier:
        """Train on features [N, F] and labels [N] of any kind."""
        X, y = validate_data(self, X, y)
        check_classification_targets(y)
        self.classes_, labels = np.unique(column_or_1d(y, warn=True), return_inverse=True)
        self._train(self._numbers(X), labels.astype(np.int32), len(self.classes_), options)
        return self

    def predict_proba(self, X: Any) -> Array:
        """Return the probabilities of the classes."""
        logits = self._outputs(X)
        shares = np.exp(logits - logits.max(axis=-1, keepdims=True))
        return shares / shares.sum(axis=-1, keepdims=True)  # type: ignore[no-any-return]

    def predict(self, X: Any) -> Array:
        """Return the most likely labels."""
        logits = self._outputs(X)
        return self.classes_[logits.argmax(axis=-1)]  # type: ignore[no-any-return]


class Regressor(RegressorMixin, _Estimator):  # type: ignore[misc]
    """A regressor of scikit-learn, for one target or several; its arguments are those of ``ml.Classifier``."""

    loss = "mse"

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def fit(self, X: Any, y: Any, **options: Any) -> Regressor:
        """Train on features [N, F] and targets [N] or [N, T]."""
        X, y = validate_data(self, X, y, multi_output=True, y_numeric=True)
        targets = self._numbers(y).reshape(len(y), -1)
        self._flat = y.ndim == 1
        self._train(self._numbers(X), targets, targets.shape[1], options)
        return self

    def predict(self, X: Any) -> Array:
        """Return the predicted targets."""
        values = self._outputs(X)
        return values[:, 0] if self._flat else values
