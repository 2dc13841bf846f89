"""Steps of several passes and updates as one graph: the argument of ``Trainer.train_step``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from mithril import ops
from mithril.backend import CheckedType, covers
from mithril.graph import Builder, Graph, OptionError, Output, Value, float32, int32, result, unknown
from mithril_train.step.step import (
    FINITE,
    NORM,
    SOUND,
    STEP,
    UPDATE,
    carried_values,
    clipped,
    global_norm,
    is_finite,
    rate_name,
    scalars_of,
    updated_parameter,
)
from mithril_train.step.step_config import StepConfig

Differentiate = Callable[[str, tuple[str, ...]], Graph]  # of a loss, for parameters
KEY = 0x73746570  # "step" in ASCII


class TrainStep(metaclass=CheckedType):
    """A step under construction. Its methods emit operations; values are those of the graph.

    ``params`` are the parameters as the step has updated them so far, ``batch`` the columns of the batch. A ``part`` of
    a step is the same step, with its own loss and parameters as defaults.
    """

    def __init__(
        self,
        measured: Graph,
        recipe: StepConfig,
        trained: tuple[str, ...],
        differentiate: Differentiate,
    ) -> None:
        self.recipe, self.trained, self._differentiate = recipe, trained, differentiate
        self.builder = Builder(measured.name)
        self.params: dict[str, Value] = {}
        self.state: dict[str, Value] = {}
        self.batch: dict[str, Value] = {}
        self._extra: dict[str, Value] = {}  # slots, averages and counters
        self._inputs: dict[str, Value] = {}
        for i in measured.arguments:
            is_parameter = i.role == "param" or i.name in trained
            role = "param" if is_parameter or i.role == "state" else "input"
            tags = {**i.tags, "donated": True} if role == "param" else i.tags
            value = self.builder.input(i.name, i.type.shape, i.type.dtype, role, tags=tags)
            (self.params if is_parameter else self.state if i.role == "state" else self.batch)[i.name] = value
        for name, entry in carried_values(measured, recipe, trained).items():
            self._extra[name] = self.builder.input(
                name, entry.type.shape, entry.type.dtype, "param", tags={"donated": True}
            )
        self._before = {**self.params, **self.state, **self._extra}
        self._rates = {p: self.builder.input(rate_name(p), (), float32) for p in recipe.optimizer.rates(0)}
        self._reports: dict[str, Output] = {}
        self._differentiated: set[str] = set()
        self._flags: dict[str, Output] = {}
        self._sound: list[Value] = []
        self._keys = 0
        self._loss, self._pattern = "loss", "*"
        self._shared = self  # parts share everything with the step

    def part(self, pattern: str) -> TrainStep:
        """Return this step for the parameters of a pattern, and for their loss if each optimizer has one."""
        part = object.__new__(TrainStep)
        part.__dict__ = dict(self.__dict__)
        part._pattern, part._loss = pattern, self.recipe.loss_of_part.get(pattern, self._loss)
        return part

    # -- gradients ---------------------------------------------------------------------------------------------------
    def gradients(
        self, loss: str | None = None, wrt: str | None = None, params: Mapping[str, Value] | None = None
    ) -> dict[str, Value]:
        """Run the model forward and backward, and return the gradients of a loss by parameter.

        ``loss`` is one of several losses by name, ``wrt`` a pattern of parameters; ``params`` are values to use in
        place of the current ones.
        """
        step = self._shared
        loss, pattern = loss or self._loss, wrt or self._pattern
        names = tuple(n for n in self.trained if covers(pattern, n))
        if not names:
            message, facts, hint = unknown("parameter", pattern, self.trained)
            raise OptionError(f"train_step: {message}", facts=facts, hint=hint)
        for name in params or {}:
            if name not in self.params:
                message, facts, hint = unknown("parameter", name, list(self.params))
                raise OptionError(f"train_step: {message}", facts=facts, hint=hint)
        graph = self._differentiate(loss, names)
        values = {**self.batch, **self.state, **self.params, **(params or {})}
        with self.builder:
            outputs = self.builder.inline(graph, [values[i.name] for i in graph.arguments])
        results = [Output(v, r.name, r.role, r.of) for v, r in zip(outputs, graph.results, strict=True)]
        for r in results:
            if r.role == "state":
                self.state[r.of] = r.value
            elif r.role == "check":
                step._add_flag(r)
            elif r.role == "report" and (r.name not in self._reports or r.of == loss not in self._differentiated):
                self._reports[r.name] = r  # of the first pass that differentiates this loss
        self._differentiated.add(loss)
        gradients = {r.of: r.value for r in results if r.role == "gradient"}
        return {n: self._float(gradients[n]) for n in names}

    def _add_flag(self, flag: Output) -> None:
        """Combine the flags of a loop that runs in several passes: 0 means that it has ended."""
        earlier = self._flags.get(flag.name)
        with self.builder:
            value = flag.value if earlier is None else ops.maximum(earlier.value, flag.value)
        self._flags[flag.name] = Output(value, flag.name, flag.role, flag.of)

    def _float(self, g: Value) -> Value:
        with self.builder:
            return ops.cast(g, dtype=float32) if g.dtype.bits < 32 else g

    def norm(self, gradients: Mapping[str, Value]) -> Value:
        """Return the norm of all gradients together."""
        return global_norm(gradients.values())

    # -- updates -----------------------------------------------------------------------------------------------------
    def update(self, gradients: Mapping[str, Value]) -> None:
        """Clip the gradients and update their parameters by their optimizers."""
        unknown_name = next((n for n in gradients if n not in self.trained), None)
        if unknown_name is not None:
            message, facts, hint = unknown("trained parameter", unknown_name, self.trained)
            raise OptionError(f"train_step: {message}", facts=facts, hint=hint)
        recipe, optimizer = self.recipe, self.recipe.optimizer
        with self.builder, self.builder.at(self.builder.origin, UPDATE):
            short = [g for g in gradients.values() if len(g.shape) < 2] or list(gradients.values())
            self._sound += [ops.sum(g) for g in short]
            selected, norm = clipped(recipe, gradients)
            if norm is not None:
                self._reports[NORM] = result("report", "gradient_norm", norm)
            t = ops.cast(self._before[STEP] + 1, dtype=float32)
            scalars: dict[str, Any] = {}
            for group in dict.fromkeys(map(optimizer.group_of, selected)):
                rate = self._rates[group if group in self._rates else ""]
                scalars[group] = scalars_of(recipe, optimizer.in_group(group), t, rate)
            for name, g in selected.items():
                new = updated_parameter(
                    recipe, name, self.params[name], g, self._extra, scalars[optimizer.group_of(name)]
                )
                self.params[name] = new.pop(name)
                self._extra.update(new)

    def report(self, name: str, value: Value) -> None:
        """Report a scalar with the loss and the metrics."""
        if not isinstance(value, Value) or value.shape != ():
            shown = value.type if isinstance(value, Value) else type(value).__name__
            raise OptionError(f"train_step: the report '{name}' is {shown}, expected a scalar", hint="ops.mean(x)")
        output = result("report", name, value)
        self._reports[output.name] = output

    def key(self) -> Value:
        """Return a new random key, different in every step."""
        shared = self._shared
        shared._keys += 1
        with self.builder:
            start = self.builder.constant(np.array([KEY, shared._keys], np.uint32))
            return ops.fold_in(start, ops.cast(self._before[STEP], dtype=int32))

    # -- the graph ---------------------------------------------------------------------------------------------------
    def finish(self) -> Graph:
        """Return the graph of the step, in which a step that is not finite changes nothing."""
        new = {**self.params, **self.state, **self._extra}
        reports = {**self._reports, **self._flags}
        with self.builder, self.builder.at(self.builder.origin, UPDATE):
            new[STEP] = self._before[STEP] + 1
            if self.recipe.guarded:
                total: Any = None
                scalars = [r.value for r in self._reports.values() if r.role == "report" and r.of.endswith("loss")]
                for x in (*self._sound, *scalars):
                    x = x if x.dtype is float32 else ops.cast(x, dtype=float32)
                    total = x if total is None else total + x
                good = is_finite(total)
                if self.recipe.stops:
                    good = new[SOUND] = ops.logical_and(good, self._before[SOUND])
                reports[FINITE] = result("report", FINITE, good)
                new = {n: self._selected(good, v, self._before[n], n) for n, v in new.items()}
            for flag in self._flags.values():
                ended = ops.equal(flag.value, 0)
                new = {n: ops.where(ended, v, self._before[n]) for n, v in new.items()}
        carried = [Output(v, name, "state", name) for name, v in new.items()]
        return self.builder.build((*carried, *reports.values()))

    def _selected(self, good: Value, new: Value, old: Value, name: str) -> Value:
        if new is old or name == SOUND:
            return new
        return ops.where(good, new, old)


def written(measured: Graph, recipe: StepConfig, trained: Iterable[str], differentiate: Differentiate) -> Graph:
    """Return the graph of the step that the recipe's program builds."""
    step = TrainStep(measured, recipe, tuple(trained), differentiate)
    assert recipe.program is not None
    with step.builder:
        recipe.program(step)
    if not step._reports:
        raise OptionError("train_step computed no gradients", hint="step.update(step.gradients())")
    return step.finish()
