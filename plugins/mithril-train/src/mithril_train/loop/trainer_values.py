"""The values of a training, which can be read and set at any time: parameters, state, rates, the frozen set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mithril.backend import CheckedType, mismatch
from mithril.compiler import CompiledModel
from mithril.graph import InputError, OptionError
from mithril.models import Layer
from mithril_train.engine.engine import Engine
from mithril_train.optim.optimizers import Optimizer, named_optimizer
from mithril_train.step.step import ema_name
from mithril_train.step.step_config import StepConfig


class LayerPatterns:
    """The patterns of the parameters of the layers of a model."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def pattern(self, key: Any) -> Any:
        """Return the pattern of the parameters of a layer; other keys are returned unchanged."""
        if not isinstance(key, Layer):
            return key
        if key is self.model:
            return "*"
        layers = self.model.walk() if isinstance(self.model, Layer) else ()
        path = next((path for path, layer in layers if layer is key), None)  # of the first use, as in names
        if path is None:
            raise OptionError(
                f"{key!r} is not a layer of the model",
                hint="pass a layer of model.walk(), which a copy or a replaced layer is not, or a pattern of names",
            )
        return f"{path}.*"

    def patterns(self, keys: Any) -> tuple[str, ...]:
        """Return the patterns of a pattern, a layer, or several of them."""
        return tuple(map(self.pattern, [keys] if isinstance(keys, (str, Layer)) else keys))

    def table(self, table: Any) -> Any:
        """Return a table with patterns as keys; anything else is returned unchanged."""
        return {self.pattern(key): x for key, x in table.items()} if isinstance(table, Mapping) else table

    def optimizer(self, optimizer: Any) -> Any:
        """Return the optimizer, or the table of optimizers, with patterns as keys of parts and groups."""
        if isinstance(optimizer, Mapping):
            return {pattern: self.optimizer(part) for pattern, part in self.table(optimizer).items()}
        if isinstance(optimizer, str):
            return named_optimizer(optimizer)
        if any(isinstance(key, Layer) for key in optimizer.groups):
            optimizer = replace(optimizer, groups=self.table(optimizer.groups))
        inner = getattr(optimizer, "inner", None)
        return optimizer if inner is None else replace(optimizer, inner=self.optimizer(inner))


class TrainerValues(metaclass=CheckedType):
    """The values of a trainer as properties; the base class of ``Trainer``."""

    compiled: CompiledModel
    engine: Engine
    recipe: StepConfig
    steps: int
    _rate: Any
    _frozen: bool
    _initial_values: tuple[dict[str, Any], dict[str, Any]]

    def check_finite(self) -> None:
        """Raise NotFiniteError if a step since the last check was not finite."""
        raise NotImplementedError

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer; ``trainer.learning_rate = ...`` changes its rate."""
        return self.recipe.optimizer

    @property
    def frozen(self) -> tuple[str, ...]:
        """The patterns of parameters that are not updated.

        They can be set at any time. A step for another set is compiled at its first use; parameters that are frozen
        keep their optimizer state.
        """
        return self.recipe.frozen

    @frozen.setter
    def frozen(self, patterns: str | Layer | Sequence[str | Layer]) -> None:
        if wrong := mismatch(patterns, str | Layer | Sequence[str | Layer]):
            raise OptionError(f"Trainer: frozen: {wrong}")
        recipe = replace(self.recipe, frozen=LayerPatterns(self.compiled.model).patterns(patterns))
        self.check_finite()
        self.engine.refreeze(recipe)
        self.recipe, self._frozen = recipe, True

    @property
    def learning_rate(self) -> Any:
        """The learning rate of the next step for parameters whose group does not set a rate.

        Set it to a number, a schedule or a function of the step, at any time; nothing is recompiled. With several
        optimizers it is a dictionary by pattern.
        """
        rates = self.optimizer.rates(self.steps)
        return rates.get("", rates)

    @learning_rate.setter
    def learning_rate(self, rate: Any) -> None:
        self.recipe = replace(self.recipe, optimizer=self.optimizer.with_rate(rate))
        self._rate = rate

    def get_params(self) -> dict[str, Any]:
        """Return copies of the parameters, as arrays of the backend: ``trainer.params``."""
        self._require()
        return {n: self.engine.copied(n) for n in self.engine.parameters}

    def set_params(self, params: Mapping[str, Any]) -> None:
        """Replace some or all parameters by arrays of any framework: ``trainer.params = {"head.bias": b}``.

        The optimizer state of these parameters is kept.
        """
        self._assign("parameter", self.engine.parameters, params, 0)

    @property
    def params(self) -> dict[str, Any]:
        """The parameters; reading copies them, assigning replaces some or all."""
        return self.get_params()

    @params.setter
    def params(self, params: Mapping[str, Any]) -> None:
        self.set_params(params)

    @property
    def averaged(self) -> dict[str, Any]:
        """Copies of the moving averages of the parameters (``ema=``)."""
        arrays, averages = self.engine.arrays, self._live_averages()
        return {n: self.engine.copied(ema_name(n)) if x is arrays[ema_name(n)] else x for n, x in averages.items()}

    def _live_averages(self) -> dict[str, Any]:
        """Return the moving averages in the dtypes of the parameters; the next step may overwrite them."""
        self._require()
        if self.recipe.ema is None:
            raise OptionError("there is no moving average", hint="Trainer(ema=0.999)")
        return {n: self._like(self.engine.arrays[ema_name(n)], n) for n in self.engine.trained}

    def _like(self, average: Any, name: str) -> Any:
        """Cast an average to the dtype of its parameter."""
        parameter = self.engine.arrays[name]
        if average.dtype == parameter.dtype:
            return average
        read = self.engine.backend.to_numpy
        return self.engine.backend.array(read(average).astype(read(parameter).dtype))

    @property
    def state(self) -> dict[str, Any]:
        """Copies of the model's state: running statistics, the random key. Assign to replace some or all."""
        self._require()
        return {n: self.engine.copied(n) for n in self.engine.states}

    @state.setter
    def state(self, state: Mapping[str, Any]) -> None:
        self._assign("state", self.engine.states, state, 1)

    def _assign(self, kind: str, names: Sequence[str], arrays: Mapping[str, Any], k: int) -> None:
        """Replace arrays now, or the initial arrays if training has not begun."""
        if self.engine.arrays:
            self.engine.replace(kind, names, arrays)
        else:
            self._initial_values[k].update(arrays)

    def _require(self) -> None:
        if not self.engine.arrays:
            raise InputError("there are no parameters yet", hint="trainer.begin(batch) makes them")
