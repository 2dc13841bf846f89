"""Choices and loops in models: ``If`` and ``While``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mithril.base import ModelError, closest
from mithril.ir import Builder, Value
from mithril.models.language.connection import Connection, Connections, Step
from mithril.models.language.expressions import Expression
from mithril.models.language.flatten import TRAINING_FLAG, flatten
from mithril.models.language.layer import Layer
from mithril.models.language.model import Model
from mithril.models.language.source_location import here
from mithril.models.language.trace import run_flat
from mithril.models.language.trace_context import Context


class Block:
    """A branch or a body: a model of its own, whose free names are those of the model around it."""

    def __init__(self, what: str, item: Any) -> None:
        self.named = False  # outputs carry names of the enclosing model
        self.called = isinstance(item, (Connection, Connections))
        if isinstance(item, Connections):
            item = item[0]
        if isinstance(item, Model):
            self.model = item
        elif isinstance(item, Layer):
            self.model = Model()
            self.model.adopt(Step(item, (), {t: t for t in item.outputs}, here()))
        elif isinstance(item, Connection) and item.origin.step is not None:
            step = item.origin.step
            if step.model is not None:
                raise ModelError(
                    f"{what} is already part of a model",
                    facts=[f"at {here()}", f"layer '{step.label}' at {step.place}"],
                    hint="wire it by names, or give a model",
                )
            self.model = Model()
            self.model.adopt(step)
            self.named = True
        else:
            raise ModelError(
                f"{what} cannot be a {type(item).__name__}",
                facts=[f"at {here()}", "accepted: a layer, called or not, or a model"],
            )

    @property
    def inputs(self) -> tuple[str, ...]:
        return self.model.inputs

    @property
    def outputs(self) -> tuple[str, ...]:
        return self.model.outputs

    def run(self, context: Context, known: Mapping[str, Any], part: str, outputs: Any = None) -> dict[str, Any]:
        """The block's outputs for these values, built where the trace stands; its parameters live below ``part``."""
        flat = flatten(self.model, outputs=outputs)
        slots: list[Any] = [None] * flat.slots
        for decl in flat.inputs:
            slots[decl.slot] = known.get(decl.name, decl.default)
        path, home = (f"{p}.{part}" if p else part for p in (context.path, context.home))
        return run_flat(context, flat, slots, path, home)


def updated_states(context: Context, build: Callable[[], Any]) -> list[str]:
    """The states that a piece of the model updates, found by building it into a graph that is thrown away."""
    before, context.updated = context.updated, {}
    states, draws = dict(context.states), context.draws
    try:
        with Builder("trial"):
            build()
        return list(context.updated)
    finally:
        for name in context.updated:
            context.states[name] = states.get(name, context.inputs_of_states[name])
        context.updated, context.draws = before, draws


def with_states(context: Context, names: list[str], build: Callable[[], list[Any]]) -> list[Any]:
    """What ``build`` gives and then the states of these names after it; the trace's own are left as they were."""
    states, updated = dict(context.states), dict(context.updated)
    made = build()
    after = [context.states[name] for name in names]
    context.states.update(states)
    context.updated = updated
    return [*made, *after]


class If(Layer):
    """One of two branches, chosen by a bool: the name of an input, an expression of names, or a connection.

    Both branches give the same outputs. A condition known when the model is compiled leaves no trace of the choice.
    """

    scalars = True
    output_alias = True

    def __init__(self, condition: str | bool | Connection, then_branch: Any, else_branch: Any) -> None:
        self.then = Block("then_branch", then_branch)
        self.otherwise = Block("else_branch", else_branch)
        self.expression = Expression(condition) if isinstance(condition, str) else None
        self.condition = condition
        if not isinstance(condition, (str, bool, Connection)):
            raise ModelError(
                f"If: the condition cannot be a {type(condition).__name__}",
                facts=["accepted: the name of an input, an expression, a connection, a bool"],
            )
        if set(self.then.outputs) != set(self.otherwise.outputs):
            raise ModelError(
                "If: both branches must give the same outputs",
                facts=[
                    f"then_branch gives {', '.join(self.then.outputs)}",
                    f"else_branch gives {', '.join(self.otherwise.outputs)}",
                ],
            )
        self.outputs = self.then.outputs
        names = self.expression.names if self.expression is not None else ()
        reads = dict.fromkeys([*names, *self.then.inputs, *self.otherwise.inputs])
        self.inputs = (*reads, "condition") if isinstance(condition, Connection) else tuple(reads)

    @property
    def default_bindings(self) -> Mapping[str, Any]:
        return {"condition": self.condition} if isinstance(self.condition, Connection) else {}

    @property
    def implicit_names(self) -> Mapping[str, str]:
        return {name: name for name in self.outputs} if self.then.named else {}

    @property
    def standard(self) -> tuple[str, ...]:
        free = [name for block in (self.then, self.otherwise) if not block.called for name in block.inputs]
        return tuple(dict.fromkeys(free))

    def expects(self, terminal: str) -> Any:
        """One number where only the condition reads a name; a bool where the condition is the name."""
        if self.expression is None or terminal in (*self.then.inputs, *self.otherwise.inputs):
            return None
        return (), "bool" if self.expression.text.strip() == terminal else None

    def build(self, *values: Any) -> Any:
        from mithril.ops import cond

        context = self.context
        known = dict(zip(self.inputs, values, strict=True))
        choice = self._choice(known)
        if not isinstance(choice, Value):
            return self._branch(context, known, bool(choice))

        def branch(taken: bool) -> Callable[[], list[Any]]:
            return lambda: [context.as_value(v) for v in self._branch(context, known, taken)]

        names = list(dict.fromkeys(n for taken in (True, False) for n in updated_states(context, branch(taken))))
        made = cond(
            choice,
            lambda: tuple(with_states(context, names, branch(True))),
            lambda: tuple(with_states(context, names, branch(False))),
        )
        results = list(made) if isinstance(made, (tuple, list)) else [made]
        for name, value in zip(names, results[len(self.outputs) :], strict=True):
            context.states[name] = context.updated[name] = value
        return tuple(results[: len(self.outputs)])

    def _choice(self, known: Mapping[str, Any]) -> Any:
        if self.expression is not None:
            choice = self.expression.value(known)
        else:
            choice = self.condition if isinstance(self.condition, bool) else known["condition"]
        if isinstance(choice, Value) and (not choice.dtype.is_bool or choice.ndim):
            raise ModelError(
                f"the condition '{self.expression or 'condition'}' must be one bool",
                facts=[f"it is {choice.type}"],
                hint="compare it with a number, or reduce it with any() or all()",
            )
        return choice

    def _branch(self, context: Context, known: Mapping[str, Any], taken: bool) -> tuple[Any, ...]:
        """A branch's outputs; on the side of ``is_training`` the graph is one for training, whatever it is around."""
        training = context.training
        if self.expression is not None and self.expression.text.strip() == TRAINING_FLAG:
            context.training = taken
        try:
            block, part = (self.then, "then") if taken else (self.otherwise, "else")
            made = block.run(context, known, part)
        finally:
            context.training = training
        return tuple(made[name] for name in self.outputs)


class While(Layer):
    """A loop: ``body`` runs while ``condition`` holds.

    ``initial_state`` gives each loop variable its first value (the name of a terminal, a connection, a number, an
    array), ``loop_vars`` what it becomes after a round: an expression of loop variables, of terminals of the body and
    of other names. ``output_vars`` names results and the variables they are. Whatever else the body or an expression
    reads is an input, the same in every round. ``max_trips`` bounds the rounds, which a gradient needs.
    """

    scalars = True
    output_alias = True

    def __init__(
        self,
        condition: str,
        body: Any,
        initial_state: Mapping[str, Any],
        loop_vars: Mapping[str, str],
        output_vars: Mapping[str, str] | None = None,
        max_trips: int | None = None,
    ) -> None:
        self.condition = Expression(condition)
        self.body = Block("body", body)
        self.initial = dict(initial_state)
        self.variables = tuple(self.initial)
        self.updates = {name: Expression(str(text)) for name, text in loop_vars.items()}
        self.results = dict(output_vars) if output_vars is not None else {name: name for name in self.variables}
        self.max_trips = max_trips
        for what, names in (("loop_vars", loop_vars), ("output_vars", self.results.values())):
            for name in names:
                self._check_variable(what, name)
        terminals = self.body.model.connections
        self.read = tuple(  # terminals of the body that the updates need
            dict.fromkeys(
                n
                for e in self.updates.values()
                for n in e.names
                if n in terminals and terminals[n].origin.step is not None
            )
        )
        self.outputs = tuple(self.results)
        self.inputs = self._inputs()

    def _check_variable(self, what: str, name: str) -> None:
        if name not in self.variables:
            near = closest(name, self.variables, 1)
            raise ModelError(
                f"While: '{name}' in {what} is no loop variable",
                facts=[f"initial_state has {', '.join(self.variables) or 'none'}"],
                hint=f"did you mean '{near[0]}'?" if near else None,
            )

    def _inputs(self) -> tuple[str, ...]:
        """Names read from around: initial values, then what every round sees alike."""
        found: dict[str, None] = {}
        self.connected: dict[str, Any] = {}
        for variable, given in self.initial.items():
            if isinstance(given, str):
                found[given] = None
            elif isinstance(given, Connection):
                found[f"initial_{variable}"] = None
                self.connected[f"initial_{variable}"] = given
        own = {*self.variables, *self.read}
        self.invariants = tuple(
            dict.fromkeys(
                name
                for name in [
                    *self.condition.names,
                    *(n for e in self.updates.values() for n in e.names),
                    *self.body.inputs,
                ]
                if name not in own
            )
        )
        found.update(dict.fromkeys(self.invariants))
        return tuple(found)

    @property
    def default_bindings(self) -> Mapping[str, Any]:
        return self.connected

    @property
    def standard(self) -> tuple[str, ...]:
        return ()

    def expects(self, terminal: str) -> Any:
        """One number where only the condition reads a name, an integer if it is held against integers."""
        if terminal not in self.condition.names or terminal in self.body.inputs or terminal in self.initial.values():
            return None
        counts = all(type(self.initial[n]) is int for n in self.condition.names if n in self.initial)
        return (), "int32" if counts else None

    def build(self, *values: Any) -> Any:
        from mithril.ops import BOUNDED, while_loop

        context = self.context
        known = dict(zip(self.inputs, values, strict=True))
        fixed = {name: known[name] for name in self.invariants}
        start = [context.as_value(self._first(variable, known)) for variable in self.variables]

        def named(carried: tuple[Any, ...]) -> dict[str, Any]:
            return fixed | dict(zip(self.variables, carried, strict=False))

        def round_(carried: tuple[Any, ...]) -> list[Any]:
            before = named(carried)
            made = self.body.run(context, before, "body", self.read) if self.read else {}
            after = before | made
            return [
                _like(v, self.updates[n].value(after)) if n in self.updates else v
                for v, n in zip(carried, self.variables, strict=False)
            ]

        states = updated_states(context, lambda: round_(tuple(start)))
        start += [context.states[name] for name in states]

        def test(carried: tuple[Any, ...]) -> Any:
            return context.as_value(self.condition.value(named(carried)))

        def body(carried: tuple[Any, ...]) -> tuple[Any, ...]:
            kept = dict(context.states)
            context.states.update(zip(states, carried[len(self.variables) :], strict=True))
            made = tuple(with_states(context, states, lambda: round_(carried)))
            context.states.update(kept)
            return made

        last = while_loop(test, body, tuple(start), max_trips=self.max_trips)
        if self.max_trips is not None:
            nodes = Builder.current().nodes
            nodes[-1] = nodes[-1].replaced(tags={**nodes[-1].tags, BOUNDED: type(self).__name__})
        last = tuple(last) if isinstance(last, (tuple, list)) else (last,)
        for name, value in zip(states, last[len(self.variables) :], strict=True):
            context.states[name] = context.updated[name] = value
        final = dict(zip(self.variables, last, strict=False))
        return tuple(final[variable] for variable in self.results.values())

    def _first(self, variable: str, known: Mapping[str, Any]) -> Any:
        given = self.initial[variable]
        if isinstance(given, str):
            return known[given]
        if isinstance(given, Connection):
            return known[f"initial_{variable}"]
        return np.asarray(given) if isinstance(given, list) else given


def _like(carried: Value, after: Any) -> Any:
    """The update as a value; a plain number takes the variable's dtype."""
    if isinstance(after, Value):
        return after
    return Builder.current().constant(after, carried.dtype)
