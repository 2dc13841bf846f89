"""The training step as one graph: forward, loss, backward, clipping, the optimizer's update, metrics.

Carried values (parameters, the model's state, the optimizer's slots and counters) are inputs of the role ``param`` and
outputs of the same names, tagged ``donated``: a backend may overwrite the old values. The batch and the learning rates
are inputs of the role ``input``. Reports are results of the role ``report``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple
from zlib import crc32

from mithril import ops
from mithril.graph import (
    Builder,
    GradientError,
    Graph,
    Input,
    OptionError,
    Output,
    TensorType,
    Value,
    bool_,
    float32,
    int32,
    result,
    result_name,
    unknown,
)
from mithril_train.optim.optimizers import Optimizer, Scalars, toward
from mithril_train.step.objective import TOTAL, losses
from mithril_train.step.step_config import StepConfig

RATE = "learning_rate"
STATISTIC = "statistic/"  # of metrics that are merged over batches
FINITE = "finite"
LOSS, NORM = (result_name("report", name) for name in ("loss", "gradient_norm"))
SCALED = "training/scaled_loss"
STEP, COUNT = "training/step", "training/accumulated"
SCALE, GOOD = "training/loss_scale", "training/good_steps"
SOUND = "training/finite"  # carried: whether all steps so far were finite
UPDATE = {"phase": "update"}

Differentiate = Callable[[Graph, str, Iterable[str]], Graph]  # of a loss, for inputs
Update = Callable[[], dict[str, Value]]  # emits operations, returns new values by name


class Reports(NamedTuple):
    """Results that a step reports, as arrays of the backend."""

    values: dict[str, Any]  # the loss, averaged metrics, and whether all values were finite
    statistics: dict[str, Any]  # of metrics that are merged over batches, by ``statistic_name``


@dataclass(frozen=True)
class TrainState:
    """A value that a step reads and returns: its type and its initial value."""

    type: TensorType
    initial: float | None
    parameter: str = ""  # the parameter with the initial value, if ``initial`` is None


def rate_name(pattern: str) -> str:
    """Return the name of the input with the learning rate of a group."""
    return f"{RATE}/{pattern}" if pattern else RATE


def slot_name(slot: str, parameter: str) -> str:
    return f"optimizer/{slot}/{parameter}"


def ema_name(parameter: str) -> str:
    return f"ema/{parameter}"


def statistic_name(metric: str, statistic: str) -> str:
    return f"{STATISTIC}{metric}/{statistic}"


def sum_name(parameter: str) -> str:
    return f"accumulated/{parameter}"


# -- forward ---------------------------------------------------------------------------------------------------------
def continued(graph: Graph) -> Builder:
    """Return a builder that continues a graph."""
    builder = Builder(graph.name)
    builder.inputs = list(graph.inputs)
    builder.nodes = list(graph.nodes)
    builder.guards = dict.fromkeys(graph.guards)
    for i in graph.inputs:
        builder.unique(i.name)
    for node in graph.nodes:
        for v in node.results:
            builder.unique(v.name)
    return builder


def with_loss(
    traced: Graph,
    columns: Mapping[str, TensorType],
    recipe: StepConfig,
    inputs: Sequence[str],
    replaced: Mapping[str, Value],
) -> Graph:
    """Replace the outputs of the model's graph by loss and metrics as reports; keep its state.

    ``columns`` are the types of the batch; columns that the model does not use become additional inputs. Losses read
    the values of augmented columns in ``replaced``, metrics the targets of the batch.
    """
    outputs = {r.name: r.value for r in traced.results if r.role != "state"}
    for value in (v for node in traced.nodes for v in node.results if v.name in columns):
        # The column keeps the name, such as that of an output for its target.
        value.name = f"{value.name}_value"
    builder = continued(traced)
    read = {i.name: i.value for i in traced.with_role("input")}
    with builder:
        batch = {n: read[n] if n in read else builder.input(n, t.shape, t.dtype) for n, t in columns.items()}
        with builder.at(builder.origin, {"phase": "loss"}):
            parts = losses(recipe, traced, outputs, {**batch, **replaced}, inputs)
            reports = [result("report", name, value) for name, value in parts.items()]
            for name, measure in recipe.metrics.items():
                if measure.metric is None:
                    reports.append(result("report", name, measure(outputs, batch, inputs)))
                    continue
                statistics = measure.statistics(outputs, batch, inputs)
                reports += [Output(v, statistic_name(name, n), "report", name) for n, v in statistics.items()]
    return builder.build((*reports, *traced.results_of("state")))


# -- backward --------------------------------------------------------------------------------------------------------
def parameter_names(graph: Graph) -> tuple[str, ...]:
    """Return the parameters of the model, including frozen ones."""
    return tuple(
        i.name
        for i in graph.with_role("param", "input")
        if i.type.dtype.is_float and i.tags.get("trainable", i.role == "param")
    )


def trained_names(graph: Graph, recipe: StepConfig) -> tuple[str, ...]:
    """Return the parameters that the step updates."""
    names = tuple(n for n in parameter_names(graph) if recipe.trains(n))
    if not names:
        raise GradientError("there is nothing to train: the model has no parameters, or all of them are frozen")
    return names


def with_gradients(forward: Graph, recipe: StepConfig, trained: Iterable[str], differentiate: Differentiate) -> Graph:
    """Add the gradients of the parameters, of the scaled loss if there is a loss scale."""
    scaled = forward
    if recipe.loss_scale is not None:
        builder = continued(forward)
        with builder, builder.at(builder.origin, {"phase": "loss"}):
            scale = builder.input(SCALE, (), float32, "state")
            loss = next(r.value for r in forward.results if r.name == LOSS)
            scaled = builder.build((*forward.results, Output(loss * scale, SCALED)))
    # The loss is scaled before the gradient, so that small cotangents of 16 bits do not become 0 on
    # the way.
    differentiated = differentiate(scaled, SCALED if scaled is not forward else LOSS, trained)
    return differentiated.replaced(results=tuple(r for r in differentiated.results if r.name != SCALED))


def with_gradients_of(graph: Graph, loss: str, trained: Iterable[str], differentiate: Differentiate) -> Graph:
    """Add the gradients of one of several losses and of the penalties, for some parameters."""
    reports = {r.of: r for r in graph.results_of("report")}
    if loss == TOTAL:
        return differentiate(graph, reports[TOTAL].name, trained)
    if loss not in reports:
        message, facts, hint = unknown("loss", loss, [n for n in reports if n.endswith(TOTAL)])
        raise OptionError(f"train_step: {message}", facts=facts, hint=hint)
    builder = continued(graph)
    with builder, builder.at(builder.origin, {"phase": "loss"}):
        total = reports[loss].value
        for name in ("regularization", "added_loss"):
            total = total + reports[name].value if name in reports else total
        objective = builder.build((*graph.results, Output(total, SCALED)))
    differentiated = differentiate(objective, SCALED, trained)
    return differentiated.replaced(results=tuple(r for r in differentiated.results if r.name != SCALED))


# -- update ----------------------------------------------------------------------------------------------------------
def carried_values(graph: Graph, recipe: StepConfig, trained: Iterable[str]) -> dict[str, TrainState]:
    """Return the values that the step carries in addition to the model's parameters and state."""
    types = {i.name: i.type for i in graph.arguments}
    entries = {STEP: TrainState(TensorType(int32, ()), 0)}
    for name in trained:
        optimizer = recipe.optimizer.in_group(recipe.optimizer.group_of(name))
        for slot, (kind, initial) in optimizer.slots(types[name]).items():
            entries[slot_name(slot, name)] = TrainState(kind, initial, name)
        if recipe.ema is not None:
            entries[ema_name(name)] = TrainState(_accumulator_type(types[name]), None, name)
        if recipe.accumulate > 1:
            entries[sum_name(name)] = TrainState(_accumulator_type(types[name]), 0.0)
    if recipe.accumulate > 1:
        entries[COUNT] = TrainState(TensorType(int32, ()), 0)
    if recipe.loss_scale is not None:
        entries[SCALE] = TrainState(TensorType(float32, ()), recipe.loss_scale.initial)
        entries[GOOD] = TrainState(TensorType(int32, ()), 0)
    if recipe.stops:
        entries[SOUND] = TrainState(TensorType(bool_, ()), 1)
    return entries


def _accumulator_type(t: TensorType) -> TensorType:
    return t if t.dtype.bits >= 32 else TensorType(float32, t.shape)


def with_update(
    graph: Graph, recipe: StepConfig, trained: tuple[str, ...], *, last: bool = True, branch: bool = False
) -> Graph:
    """Build the full step. ``last=False`` only accumulates gradients, for all but the last batch of a step.

    ``branch`` skips an update with ``if``, which costs nothing if operations run one by one; otherwise each value is
    selected, which costs nothing if the operations are fused.
    """
    return _Update(graph, recipe, trained, last, branch).run()


class _Update:
    """Builder of the part after the backward pass."""

    def __init__(self, graph: Graph, recipe: StepConfig, trained: tuple[str, ...], last: bool, branch: bool) -> None:
        self.graph, self.recipe, self.trained, self.last, self.branch = graph, recipe, trained, last, branch
        self.gradients = {r.of: r.value for r in graph.results_of("gradient")}
        self.state = {r.of: r.value for r in graph.results_of("state")}
        self.builder = continued(graph)
        values = {i.name: i.value for i in graph.arguments}
        self.parameters = {name: values[name] for name in trained}
        self.old: dict[str, Value] = {}  # carried values at the start of the step
        self.new: dict[str, Value] = {}
        for i in graph.inputs:
            if i.role in ("param", "state") or i.name in trained:
                self.old[i.name] = i.value
        for name, entry in carried_values(graph, recipe, trained).items():
            if name not in self.old:
                self.old[name] = self.builder.input(name, entry.type.shape, entry.type.dtype, "param")

    def run(self) -> Graph:
        builder, recipe = self.builder, self.recipe
        with builder, builder.at(builder.origin, UPDATE):
            gradients = {n: self._float(self.gradients[n]) for n in self.trained}
            reports = {r.name: r for r in self.graph.results_of("report", "check")}
            if not self.last:
                self.new.update(self.state)
            if recipe.accumulate > 1:
                gradients = self._accumulated(gradients)
            if self.last:
                gradients = self._unscaled(gradients)
                # Whether a step is finite is decided before clipping, which would hide an infinite gradient
                # behind the bound.
                unclipped = gradients
                gradients, norm = clipped(recipe, gradients)
                if norm is not None:
                    reports[NORM] = result("report", "gradient_norm", norm)
                updates = self._updates(gradients)
                if recipe.guarded:
                    good = self._all_finite(reports, unclipped)
                    reports[FINITE] = result("report", FINITE, good)
                    self._guarded(good, updates)
                    self._rescale(good)
                else:
                    for update in updates:
                        self.new.update(update())
            # Then the call raises an error and changes nothing.
            for cut_off in self.graph.results_of("check"):
                ended = ops.equal(cut_off.value, 0)
                self.new = {n: ops.where(ended, v, self.old[n]) for n, v in self.new.items()}
            carried = [Output(self.new.get(name, v), name, "state", name) for name, v in self.old.items()]
        step = builder.build((*carried, *reports.values()))
        return step.replaced(inputs=tuple(self._role(i) for i in step.inputs), name="step" if self.last else "sum")

    def _role(self, i: Input) -> Input:
        if i.name not in self.old or i.role == "constant":
            return i
        return replace(i, role="param", tags={**i.tags, "donated": True})  # the old value is dead after the step

    # -- gradients ---------------------------------------------------------------------------------------------------
    def _float(self, g: Value) -> Value:
        return ops.cast(g, dtype=float32) if g.dtype.bits < 32 else g

    def _accumulated(self, gradients: dict[str, Value]) -> dict[str, Value]:
        total = {n: self.old[sum_name(n)] + g for n, g in gradients.items()}
        count = self.old[COUNT] + 1
        if not self.last:
            self.new.update({sum_name(n): g for n, g in total.items()}, **{COUNT: count})
            return total
        # By the batches that were added, not by the number in the recipe: the last step of an epoch may
        # have fewer.
        share = 1.0 / ops.cast(count, dtype=float32)
        self.new.update({sum_name(n): self._zero(g) for n, g in total.items()})
        self.new[COUNT] = self._zero(count)
        return {n: g * cast_to(share, g) for n, g in total.items()}

    def _zero(self, like: Value) -> Value:
        return ops.full(shape=like.shape, value=0, dtype=like.dtype)  # type: ignore[no-any-return]

    def _unscaled(self, gradients: dict[str, Value]) -> dict[str, Value]:
        if self.recipe.loss_scale is None:
            return gradients
        share = 1.0 / self.old[SCALE]
        return {n: g * cast_to(share, g) for n, g in gradients.items()}

    # -- parameters --------------------------------------------------------------------------------------------------
    def _updates(self, gradients: Mapping[str, Value]) -> list[Update]:
        """Return functions that emit parts of the update by name: the shared part, then each parameter."""
        optimizer = self.recipe.optimizer
        rates = {p: self.builder.input(rate_name(p), (), float32) for p in optimizer.rates(0)}
        step = self.old[STEP] + 1
        t = ops.cast(step, dtype=float32)
        scalars: dict[str, Scalars] = {}
        for group in dict.fromkeys(map(optimizer.group_of, self.parameters)):
            rate = rates[group if group in rates else ""]
            scalars[group] = scalars_of(self.recipe, optimizer.in_group(group), t, rate)
        parameter_updates = [partial(self._update, n, g, scalars[optimizer.group_of(n)]) for n, g in gradients.items()]
        return [lambda: {**self.state, STEP: step}, *parameter_updates]

    def _update(self, name: str, gradient: Value, scalars: Scalars) -> dict[str, Value]:
        return updated_parameter(self.recipe, name, self.parameters[name], gradient, self.old, scalars)

    def _all_finite(self, reports: Mapping[str, Output], gradients: Mapping[str, Value]) -> Value:
        """Whether loss and gradients are finite.

        A cotangent that is not finite also reaches the gradient of its layer's bias, so checking the gradients of
        one-dimensional parameters is enough to stop in time; a loss scale requires a check of every element.
        """
        dynamic = self.recipe.loss_scale is not None and self.recipe.loss_scale.dynamic
        short = [g for g in gradients.values() if len(g.shape) < 2]
        loss: Any = reports[LOSS].value
        if NORM in reports:
            total = reports[NORM].value
        else:  # added up first: of parameters in parts, this is one sum over devices
            total = None
            for g in gradients.values() if dynamic or not short else short:
                part = cast_to(ops.sum(g), loss)
                total = part if total is None else total + part
        # One sum tells all: an infinity or nan in any term remains in the sum, and opposite infinities
        # give nan.
        good: Value = is_finite(total + loss)
        # Later steps change nothing either, so that the failed step can be inspected.
        if self.recipe.stops:
            good = self.new[SOUND] = ops.logical_and(good, self.old[SOUND])
        return good

    def _guarded(self, good: Value, updates: list[Update]) -> None:
        """Keep the old values if loss or gradients are not finite.

        Each parameter has a separate ``if``, so that its gradient is released before the next one is updated.
        """
        for update in updates:
            if self.branch:
                self.new.update(self._branched(good, update))
            else:
                self.new.update({n: ops.where(good, v, self.old[n]) for n, v in update().items()})

    def _branched(self, good: Value, update: Update) -> dict[str, Value]:
        names: list[str] = []

        def then() -> tuple[Value, ...]:
            selected = update()
            names.extend(selected)
            return tuple(selected.values())

        selected = ops.cond(good, then, lambda: tuple(self.old[n] for n in names))
        return dict(zip(names, selected, strict=True))

    def _rescale(self, good: Value) -> None:
        """Compute the next dynamic loss scale."""
        scale = self.recipe.loss_scale
        if scale is None or not scale.dynamic:
            return
        run = ops.where(good, self.old[GOOD] + 1, 0)
        grown = ops.greater_equal(run, scale.patience)
        before = self.old[SCALE]
        raised = ops.where(grown, before * scale.factor, before)
        self.new[SCALE] = ops.where(good, raised, before * (1.0 / scale.factor))
        self.new[GOOD] = ops.where(grown, 0, run)


def cast_to(scalar: Value, like: Value) -> Value:
    return scalar if scalar.dtype is like.dtype else ops.cast(scalar, dtype=like.dtype)


def clipped(recipe: StepConfig, gradients: Mapping[str, Value]) -> tuple[dict[str, Value], Value | None]:
    """Return the gradients within the bounds of the recipe, and their norm if it is bounded."""
    selected = dict(gradients)
    if recipe.clip_value is not None:
        limit = recipe.clip_value
        selected = {n: ops.clip(g, low=-limit, high=limit) for n, g in selected.items()}
    if recipe.clip_norm is None:
        return selected, None
    norm = global_norm(selected.values())
    # 1e-6 as in torch.nn.utils.clip_grad_norm_, so that the same recipe gives the same numbers.
    share = ops.minimum(recipe.clip_norm / (norm + 1e-6), 1.0)
    return {n: g * cast_to(share, g) for n, g in selected.items()}, norm


def scalars_of(recipe: StepConfig, optimizer: Optimizer, t: Value, rate: Any) -> Scalars:
    """Return the scalars of step ``t``, which the updates of all parameters of a group share.

    The average follows the parameters faster in early steps: with the decay alone, the random initial parameters keep
    the share decay ** t, which is 27 % after 132 steps of 0.99.
    """
    scalars: Scalars = optimizer.scalars(t, rate)
    if recipe.ema is None:
        return scalars
    return {**scalars, "average_share": ops.maximum(9.0 / (t + 9.0), 1.0 - recipe.ema)}


def updated_parameter(
    recipe: StepConfig, name: str, p: Value, gradient: Value, old: Mapping[str, Value], scalars: Scalars
) -> dict[str, Value]:
    """Return a parameter and its optimizer state after an update, by name."""
    optimizer = recipe.optimizer.in_group(recipe.optimizer.group_of(name))
    slots = {s: old[slot_name(s, name)] for s in optimizer.slots(p.type)}
    # An update is often smaller than half a digit of 16 bits, and would be lost.
    upcast = ops.cast(p, dtype=float32) if p.dtype.bits < 32 else p
    index = crc32(name.encode()) & 0x7FFFFFFF  # for random numbers that differ between parameters
    updated, new_slots = optimizer.update(upcast, cast_to(gradient, upcast), slots, {**scalars, "index": index})
    new = {slot_name(s, name): v for s, v in new_slots.items()}
    if recipe.ema is not None:
        new[ema_name(name)] = toward(old[ema_name(name)], updated, cast_to(scalars["average_share"], updated))
    new[name] = ops.cast(updated, dtype=p.dtype) if updated.dtype is not p.dtype else updated
    return new


def is_finite(x: Value) -> Value:
    """Whether all elements are neither nan nor infinite."""
    return ops.less(ops.abs(x), float("inf"))


def global_norm(gradients: Iterable[Value]) -> Value:
    """Return the square root of the sum of all squares."""
    total: Any = None
    for g in gradients:
        square = ops.sum(g * g)
        square = square if square.dtype is float32 else ops.cast(square, dtype=float32)
        total = square if total is None else total + square
    return ops.sqrt(total)  # type: ignore[no-any-return]
