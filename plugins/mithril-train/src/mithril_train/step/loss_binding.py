"""Binding of losses and metrics: their parameters are looked up by name among outputs, inputs and the batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import numpy as np

from mithril.graph import (
    LAYERS,
    MithrilError,
    OperationError,
    OptionError,
    Value,
    closest,
    name_here,
    operation,
    operations,
    unknown,
)
from mithril.models import (
    AUC,
    Accuracy,
    AveragePrecision,
    BrierScore,
    ExplainedVariance,
    Layer,
    LogLoss,
    MaxError,
    MeanAbsoluteError,
    MeanAbsolutePercentageError,
    MeanSquaredError,
    MeanSquaredLogError,
    Metric,
    Perplexity,
    R2Score,
    RootMeanSquaredError,
)

MATRIX = 400  # numbers of a metric in a row of the history, such as a confusion matrix of 20 classes
MEASURES = "a function of values, an operation or its name, a layer without parameters"
SAMPLE_WEIGHT = "sample_weight"  # the column with a weight per sample, or per element of a sequence


@dataclass(frozen=True)
class ScalarFunction:
    """A loss or a metric: a function of some values of the step."""

    name: str
    wants: tuple[str, ...]  # parameter names, in order
    function: Callable[..., Any]
    metric: Metric | None = None  # with statistics that are merged over batches; other values are averaged
    output: str = ""  # of the model, if the function compares this output with its target
    position: int = 0  # of the target among those of a tuple
    unreduced: Callable[..., Any] | None = None  # the same loss with one value per sample

    def elements(self, outputs: Mapping[str, Value], columns: Mapping[str, Value], inputs: Sequence[str]) -> Value:
        """Compute the loss of each sample. A custom function may return these instead of their mean."""
        values = (self.unreduced or self.function)(*self._operands(outputs, columns, inputs))
        if not isinstance(values, Value) or values.shape == ():
            raise OptionError(
                f"'{self.name}' is one number per batch, and the batch has weights of its samples",
                hint="return the loss of each sample (reduction='none'), or add the parameter sample_weight",
            )
        return values

    def __call__(self, outputs: Mapping[str, Value], columns: Mapping[str, Value], inputs: Sequence[str]) -> Value:
        """Compute the scalar. ``columns`` is the full batch, ``inputs`` the columns that the model uses."""
        measured = self.function(*self._operands(outputs, columns, inputs))
        if not isinstance(measured, Value):
            raise OptionError(f"'{self.name}' gave {type(measured).__name__}, expected a value of the graph")
        if measured.shape != ():
            raise OptionError(
                f"'{self.name}' is {measured.type}, not a scalar", hint="reduce it with ops.mean(x) or ops.sum(x)"
            )
        return measured

    def statistics(
        self, outputs: Mapping[str, Value], columns: Mapping[str, Value], inputs: Sequence[str]
    ) -> dict[str, Value]:
        """Return the statistics of a batch, for a metric that defines them."""
        assert self.metric is not None
        try:
            statistics = self.metric.statistics(*self._operands(outputs, columns, inputs))
        except MithrilError as error:
            raise error.with_facts(f"in the metric {self.metric!r}") from None
        if not isinstance(statistics, Mapping) or not statistics or not all(map(_is_value, statistics.values())):
            raise OptionError(
                f"{type(self.metric).__name__}.statistics returned {statistics!r}",
                facts=["expected: a dictionary with values of the graph by name"],
            )
        try:  # before the first step, as an error after an epoch would lose it
            shape = self._result({n: np.ones([int(d) for d in v.shape]) for n, v in statistics.items()}).shape
        except Exception:
            return dict(statistics)  # this metric has a result for the numbers of data only
        self._check_size(shape)
        return dict(statistics)

    def results(self, name: str, totals: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, float]:
        """Return the metric of merged statistics by ``name``; elements of an array, such as one per class, ``name/0``.

        Those of a matrix are ``name/0/0``, ``name/0/1`` and so on.
        """
        result = self._result(totals)
        self._check_size(result.shape)
        return {"/".join([name, *map(str, k)]): float(result[k]) for k in np.ndindex(result.shape)}

    def _result(self, totals: Mapping[str, np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
        assert self.metric is not None
        with np.errstate(divide="ignore", invalid="ignore"):  # nan if a metric is undefined
            return np.asarray(self.metric.result(**totals))

    def _check_size(self, shape: Sequence[int]) -> None:
        if len(shape) > 1 and prod(shape) > MATRIX:
            raise OptionError(
                f"metric '{self.name}' is an array of shape {list(shape)}, and the history has a column per number",
                facts=[f"accepted: numbers, vectors, and arrays of up to {MATRIX} numbers"],
                hint=f"leave it out and compute {self.metric!r}(trainer.predict(inputs), targets)",
            )

    def _operands(
        self, outputs: Mapping[str, Value], columns: Mapping[str, Value], inputs: Sequence[str]
    ) -> list[Value]:
        if self.output:
            return self._of_output(outputs, columns, inputs)
        available = {**columns, **outputs}
        if all(name in available for name in self.wants):
            return [available[name] for name in self.wants]
        targets = [name for name in columns if name not in inputs and name != SAMPLE_WEIGHT]
        if len(self.wants) == 2 and len(outputs) == 1 and len(targets) == 1:
            return [next(iter(outputs.values())), columns[targets[0]]]
        facts = [f"outputs: {', '.join(outputs)}", f"batch: {', '.join(columns)}"]
        if len(self.wants) == 2 and len(outputs) == 1 and not any(name in available for name in self.wants):
            if not targets:
                message = "the batch has no target: the model reads all of its columns"
                raise OptionError(f"'{self.name}': {message}", facts=facts, hint="batches of (inputs, target)")
            message = f"compares the output with one target, but {len(targets)} columns are no inputs of the model"
            names = ", ".join([*outputs, *targets])
            raise OptionError(
                f"'{self.name}' {message}: {', '.join(targets)}",
                facts=facts,
                hint=f"drop columns, or name those that the loss reads: def loss({names}): ...",
            )
        missing = next(name for name in self.wants if name not in available)
        suggestions = closest(missing, available, 1)
        raise OptionError(
            f"'{self.name}' reads '{missing}', which is neither an output of the model nor in the batch",
            facts=facts,
            hint=f"did you mean '{suggestions[0]}'?"
            if suggestions
            else "name the parameters after outputs and columns of the batch",
        )

    def _of_output(
        self, outputs: Mapping[str, Value], columns: Mapping[str, Value], inputs: Sequence[str]
    ) -> list[Value]:
        """Return an output and its target: the column of its name, else the target at its position in a tuple."""
        output, targets = outputs[self.output], {n: v for n, v in columns.items() if n not in inputs}
        available = {**columns, **outputs}
        if len(self.wants) != 2 or all(name in available for name in self.wants):
            return ScalarFunction(self.name, self.wants, self.function)._operands(outputs, columns, inputs)
        positional = "target" if self.position == 0 else f"target_{self.position}"
        for name in (self.output, positional):
            if name in targets:
                return [output, targets[name]]
        raise OptionError(
            f"the batch has no target for the output '{self.output}'",
            facts=[f"outputs: {', '.join(outputs)}", f"batch: {', '.join(columns)}"],
            hint=f"add a column '{self.output}' with the targets",
        )


def _is_value(x: Any) -> bool:
    return isinstance(x, Value)


# Metrics without arguments, by name.
METRICS: Mapping[str, type[Layer]] = {
    "accuracy": Accuracy,
    "auc": AUC,
    "mean_absolute_error": MeanAbsoluteError,
    "mean_squared_error": MeanSquaredError,
    "perplexity": Perplexity,
    "r2_score": R2Score,
    "root_mean_squared_error": RootMeanSquaredError,
    "mean_absolute_percentage_error": MeanAbsolutePercentageError,
    "mean_squared_log_error": MeanSquaredLogError,
    "explained_variance": ExplainedVariance,
    "max_error": MaxError,
    "average_precision": AveragePrecision,
    "brier_score": BrierScore,
    "log_loss": LogLoss,
}


# Metrics whose threshold depends on the outputs: probabilities or logits.
THRESHOLDED = {
    "binary_accuracy": "BinaryAccuracy",
    "f1": "F1Score",
    "f1_score": "F1Score",
    "precision": "Precision",
    "recall": "Recall",
}

SHORT = {
    "bce": "binary_cross_entropy",
    "mae": "mean_absolute_error",
    "r2": "r2_score",
    "rmse": "root_mean_squared_error",
    "mape": "mean_absolute_percentage_error",
    "msle": "mean_squared_log_error",
}


def losses() -> list[str]:
    """Return the operations that compare two operands and reduce, including those of third parties."""
    return [
        name
        for name, op in operations().items()
        if len(op.operands) - len(op.optional) == 2 and "reduction" in op.attributes
    ]


def _loss(word: str) -> Any:
    """Return the operation of a name, which may omit its suffix: ``mse`` is ``mse_loss``."""
    try:
        return operation(word)
    except OperationError:
        return operation(f"{word}_loss")


def as_measure(source: Any, name: str = "") -> ScalarFunction:
    """Convert an operation or its name, a layer such as ``ml.models.Accuracy()``, or a function to a measure."""
    if isinstance(source, ScalarFunction):
        return source
    if isinstance(source, str):
        word = SHORT.get(source, source)
        if word in METRICS:
            return as_measure(METRICS[word](), name or source)
        try:
            return as_measure(_loss(word), name or source)
        except OperationError:
            message, facts, hint = unknown("loss or metric", source, [*losses(), *METRICS])
            if source in THRESHOLDED:
                hint = f"metrics=ml.models.{THRESHOLDED[source]}(threshold=0.5) for probabilities, 0.0 for logits"
            raise OptionError(message, facts=facts, hint=hint) from None
    if isinstance(source, Layer):
        metric = source if isinstance(source, Metric) else None
        rows = _built(_unreduced_layer(source)) if getattr(source, "attributes", {}).get("reduction") else None
        return ScalarFunction(
            name or type(source).__name__, tuple(source.inputs), _built(source), metric, unreduced=rows
        )
    operands = getattr(source, "operands", None)
    if operands is not None and callable(source):
        optional: frozenset[str] = getattr(source, "optional", frozenset())
        rows = partial(source, reduction="none") if "reduction" in source.attributes else None
        wants = tuple(o for o in operands if o not in optional)
        return ScalarFunction(name or source.name, wants, source, unreduced=rows)
    if callable(source):
        layer_inputs = [
            p.name
            for p in inspect.signature(source).parameters.values()
            if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        called = getattr(source, "__name__", type(source).__name__)
        # Such as the losses of PyTorch, whose call takes *args and computes on its tensors.
        if not layer_inputs:
            layer = name_here(called, LAYERS)
            raise OptionError(
                f"{called} of {getattr(source, '__module__', 'unknown')} cannot be a loss or metric",
                facts=["it names no parameters", "accepted: " + MEASURES],
                hint=f"write ml.models.{layer}()" if layer else "write a function of values with operations of ml.ops",
            )
        return ScalarFunction(name or called, tuple(layer_inputs), source)
    raise OptionError(
        f"'{source!r}' is not a loss or metric",
        facts=["accepted: " + MEASURES],
    )


def _unreduced_layer(layer: Layer) -> Layer:
    args, options = layer.arguments
    return type(layer)(*args, **{**options, "reduction": "none"})


def _built(layer: Layer) -> Callable[..., Any]:
    def run(*operands: Value) -> Any:
        try:
            return layer.build(*operands)
        except MithrilError as error:
            raise error.with_facts(f"in {layer!r} as a loss or metric") from None

    return run


def as_losses(losses: Mapping[str, Any], outputs: Sequence[str], parts: Sequence[str]) -> dict[str, ScalarFunction]:
    """Return losses by name; the name of an output binds the loss to this output and its target.

    Other names are those of the ``parts`` that have an optimizer, or free names of custom functions.
    """
    if not losses:
        raise OptionError("loss is an empty dictionary", hint='loss={"logits": "cross_entropy"}, by output')
    measures = {}
    for k, (name, loss) in enumerate(losses.items()):
        if not isinstance(name, str):
            raise OptionError(f"losses are named by strings, got {name!r} ({type(name).__name__})")
        if isinstance(loss, str) and loss in outputs:
            measures[name] = ScalarFunction(loss, (loss,), lambda value: value)
            continue
        measure = as_measure(loss)
        if name not in (*outputs, *parts) and len(measure.wants) == 2 and measure.unreduced is not None:
            message, facts, hint = unknown("output", name, outputs)
            raise OptionError(f"loss: {message}", facts=facts, hint=hint)
        measures[name] = replace(measure, output=name if name in outputs else "", position=k)
    return measures


def as_metrics(metrics: Any) -> dict[str, ScalarFunction]:
    """Return metrics by name, from a mapping, a list, or a single one."""
    if metrics is None:
        return {}
    if isinstance(metrics, Mapping):
        by_name: dict[str, ScalarFunction] = {}
        for k, (name, m) in enumerate(metrics.items()):
            if isinstance(m, (list, tuple)):  # the metrics of an output
                by_name.update((f"{name}_{n}", replace(f, output=name, position=k)) for n, f in as_metrics(m).items())
            else:
                by_name[name] = as_measure(m, name)
        return by_name
    many = metrics if isinstance(metrics, (list, tuple)) else [metrics]
    measures = [as_measure(m, _short(m)) for m in many]
    names = [m.name for m in measures]
    if len(set(names)) != len(names):
        raise OptionError(
            f"two metrics are named '{next(n for n in names if names.count(n) > 1)}'",
            hint="give them names: metrics={'a': ..., 'b': ...}",
        )
    return {m.name: m for m in measures}


def _short(metric: Any) -> str:
    if isinstance(metric, Layer):
        from mithril.models import snake_case

        return snake_case(type(metric).__name__)
    return ""
