"""The objective of a step: losses by output with their weights, sample weights, regularizers, losses of layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mithril import ops
from mithril.backend import covers
from mithril.compiler import ADDED_LOSS
from mithril.graph import GradientError, Graph, OptionError, Value, float32, shape_text, unknown
from mithril_train.step.loss_binding import SAMPLE_WEIGHT, ScalarFunction
from mithril_train.step.step_config import StepConfig, loss_name

TOTAL = "loss"


def losses(
    config: StepConfig,
    traced: Graph,
    outputs: Mapping[str, Value],
    batch: Mapping[str, Value],
    inputs: Sequence[str],
) -> dict[str, Value]:
    """Return the total loss as ``loss``, then its parts if there are several."""
    parts = _parts(config, outputs, batch, inputs)
    penalties = regularization(config, traced)
    if penalties is not None:
        parts["regularization"] = penalties
    added = added_losses(traced)
    if added is not None:
        parts["added_loss"] = added
    if list(parts) == [TOTAL]:
        return parts
    weights = {loss_name(name): weight for name, weight in config.loss_weights.items()}
    total: Any = None
    for name, value in parts.items():
        weighted = value * weights[name] if name in weights else value
        total = weighted if total is None else total + weighted
    return {TOTAL: total, **{n: v for n, v in parts.items() if n != TOTAL}}


def _parts(
    config: StepConfig, outputs: Mapping[str, Value], batch: Mapping[str, Value], inputs: Sequence[str]
) -> dict[str, Value]:
    if isinstance(config.loss, Mapping):
        return {loss_name(n): _scalar(measure(f, outputs, batch, inputs)) for n, f in config.loss.items()}
    if isinstance(config.loss, ScalarFunction):
        return {TOTAL: _scalar(measure(config.loss, outputs, batch, inputs))}
    return {TOTAL: _scalar(_scalar_output(config.loss, outputs))}


def _scalar_output(name: str | None, outputs: Mapping[str, Value]) -> Value:
    scalars = {n: v for n, v in outputs.items() if v.shape == () and v.dtype.is_float}
    selected = name or (next(iter(scalars)) if len(scalars) == 1 else TOTAL)
    if selected in scalars:
        return scalars[selected]
    if name is None:
        raise OptionError(
            "which value is the loss?",
            facts=[f"scalar outputs of the model: {', '.join(scalars) or 'none'}"],
            hint='give one: Trainer(loss="cross_entropy"), or a function of the model\'s outputs and the batch',
        )
    message, facts, hint = unknown("scalar output", name, list(scalars))
    raise OptionError(message, facts=facts, hint=hint)


def _scalar(loss: Value) -> Value:
    if not loss.dtype.is_float:
        raise GradientError(f"the loss is {loss.type}: only floats have gradients")
    return loss if loss.dtype is float32 else ops.cast(loss, dtype=float32)


# -- weights of samples ----------------------------------------------------------------------------------------------
def measure(
    function: ScalarFunction, outputs: Mapping[str, Value], batch: Mapping[str, Value], inputs: Sequence[str]
) -> Value:
    """Compute a loss; its mean is weighted if the batch has weights that the loss does not read itself."""
    weights = batch.get(SAMPLE_WEIGHT)
    if weights is None or SAMPLE_WEIGHT in inputs or SAMPLE_WEIGHT in function.wants:
        return function(outputs, batch, inputs)
    return weighted_mean(function.name, function.elements(outputs, batch, inputs), weights)


def weighted_mean(name: str, values: Value, weights: Value) -> Value:
    """Return the mean of one value per sample, or per element of the weights; weights of 0 exclude."""
    if values.ndim < weights.ndim or values.shape[: weights.ndim] != weights.shape:
        shown = f"{shape_text(weights.shape)}, and '{name}' has {shape_text(values.shape)} values"
        raise OptionError(f"sample_weight is {shown}", hint="give one weight per sample")
    if values.ndim > weights.ndim:
        values = ops.mean(values, axis=tuple(range(weights.ndim, values.ndim)))
    if weights.dtype is not values.dtype:
        weights = ops.cast(weights, dtype=values.dtype)
    total = ops.sum(weights)
    mean: Value = ops.sum(values * weights) / ops.where(ops.equal(total, 0.0), 1.0, total)
    return mean


# -- penalties -------------------------------------------------------------------------------------------------------
def regularization(config: StepConfig, traced: Graph) -> Value | None:
    """Return the sum of all penalties on parameters; every pattern that matches a parameter applies to it."""
    total: Any = None
    for pattern, penalty in config.regularizers.items():
        for i in traced.with_role("param"):
            if not covers(pattern, i.name) or not i.type.dtype.is_float:
                continue
            value = i.value if i.type.dtype.bits >= 32 else ops.cast(i.value, dtype=float32)
            one = penalty(value)
            if not isinstance(one, Value) or one.shape != ():
                shown = one.type if isinstance(one, Value) else type(one).__name__
                raise OptionError(
                    f"the regularizer of '{pattern}' gave {shown} for '{i.name}', expected a scalar",
                    hint="reduce it: lambda w: 0.01 * ml.ops.sum(ml.ops.abs(w))",
                )
            total = one if total is None else total + one
    return None if total is None else _scalar(total)


def added_losses(traced: Graph) -> Value | None:
    """Return the sum of the losses that layers added while they were built."""
    total: Any = None
    for node in traced.nodes:
        if ADDED_LOSS in node.tags:
            total = node.result if total is None else total + node.result
    return None if total is None else _scalar(total)
