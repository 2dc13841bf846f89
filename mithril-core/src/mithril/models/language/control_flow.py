"""Branches and loops in models: ``If`` and ``While``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mithril.graph import BOUNDED, Builder, ModelError, Value, closest
from mithril.models.language.connection import Connection, Connections, Step
from mithril.models.language.expressions import Expression
from mithril.models.language.flatten import flatten
from mithril.models.language.layer import TRAINING_FLAG, Layer
from mithril.models.language.model import Model
from mithril.models.language.source_location import user_location
from mithril.models.language.trace import run_flat
from mithril.models.language.trace_context import Context


class Block:
    """A branch or loop body: a nested model whose free names refer to the enclosing model."""

    def __init__(self, description: str, item: Any) -> None:
        self.has_named_outputs = False  # whether outputs have names in the enclosing model
        self.called = isinstance(item, (Connection, Connections))
        if isinstance(item, Connections):
            item = item[0]
        if isinstance(item, Model):
            self.model = item
        elif isinstance(item, Layer):
            self.model = Model()
            self.model.attach(Step(item, (), {t: t for t in item.outputs}, user_location()))
        elif isinstance(item, Connection) and item.origin.step is not None:
            step = item.origin.step
            if step.model is not None:
                raise ModelError(
                    f"{description} is already part of a model",
                    facts=[f"at {user_location()}", f"layer '{step.label}' at {step.location}"],
                    hint="wire it by names, or pass a model",
                )
            self.model = Model()
            self.model.attach(step)
            self.has_named_outputs = True
        else:
            raise ModelError(
                f"{description} cannot be a {type(item).__name__}",
                facts=[f"at {user_location()}", "accepted: a layer, the result of calling one, or a model"],
            )

    @property
    def inputs(self) -> tuple[str, ...]:
        return self.model.inputs

    @property
    def outputs(self) -> tuple[str, ...]:
        return self.model.outputs

    def run(self, context: Context, bindings: Mapping[str, Any], name: str, outputs: Any = None) -> dict[str, Any]:
        """Build the block into the current trace and return its outputs; its parameters are named below ``name``."""
        flat = flatten(self.model, outputs=outputs)
        slots: list[Any] = [None] * flat.slots
        for decl in flat.inputs:
            slots[decl.slot] = bindings.get(decl.name, decl.default)
        path, scope = (f"{p}.{name}" if p else name for p in (context.path, context.parameter_scope))
        return run_flat(context, flat, slots, path, scope)


def updated_states(context: Context, build: Callable[[], Any]) -> list[str]:
    """Return the names of the states that ``build`` updates, by tracing it into a temporary graph."""
    outer_updates, context.updated = context.updated, {}
    states, draws = dict(context.states), context.draws
    try:
        with Builder("trial"):
            build()
        return list(context.updated)
    finally:
        for name in context.updated:
            context.states[name] = states.get(name, context.inputs_of_states[name])
        context.updated, context.draws = outer_updates, draws


def with_states(context: Context, names: list[str], build: Callable[[], list[Any]]) -> list[Any]:
    """Return the outputs of ``build``, then the updated states; restore the states of the context."""
    states, updated = dict(context.states), dict(context.updated)
    outputs = build()
    new_states = [context.states[name] for name in names]
    context.states.update(states)
    context.updated = updated
    return [*outputs, *new_states]


class If(Layer):
    """One of two branches, selected by a bool: the name of an input, an expression of names, or a connection.

    Both branches have the same outputs. If the condition is known at compile time, only that branch is compiled.
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
                "If: both branches must have the same outputs",
                facts=[
                    f"then_branch has {', '.join(self.then.outputs)}",
                    f"else_branch has {', '.join(self.otherwise.outputs)}",
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
        return {name: name for name in self.outputs} if self.then.has_named_outputs else {}

    @property
    def standard(self) -> tuple[str, ...]:
        free = [name for block in (self.then, self.otherwise) if not block.called for name in block.inputs]
        return tuple(dict.fromkeys(free))

    def expects(self, terminal: str) -> Any:
        """Return a scalar shape for names that only the condition uses, with dtype bool for a condition of one name."""
        if self.expression is None or terminal in (*self.then.inputs, *self.otherwise.inputs):
            return None
        return (), "bool" if self.expression.text.strip() == terminal else None

    def build(self, *values: Any) -> Any:
        from mithril.ops import cond

        context = self.context
        bindings = dict(zip(self.inputs, values, strict=True))
        choice = self._choice(bindings)
        if not isinstance(choice, Value):
            return self._branch(context, bindings, bool(choice))

        def branch(is_then: bool) -> Callable[[], list[Any]]:
            return lambda: [context.as_value(v) for v in self._branch(context, bindings, is_then)]

        names = list(dict.fromkeys(n for is_then in (True, False) for n in updated_states(context, branch(is_then))))
        selected = cond(
            choice,
            lambda: tuple(with_states(context, names, branch(True))),
            lambda: tuple(with_states(context, names, branch(False))),
        )
        results = list(selected) if isinstance(selected, (tuple, list)) else [selected]
        for name, value in zip(names, results[len(self.outputs) :], strict=True):
            context.states[name] = context.updated[name] = value
        return tuple(results[: len(self.outputs)])

    def _choice(self, bindings: Mapping[str, Any]) -> Any:
        if self.expression is not None:
            choice = self.expression.value(bindings)
        else:
            choice = self.condition if isinstance(self.condition, bool) else bindings["condition"]
        if isinstance(choice, Value) and (not choice.dtype.is_bool or choice.ndim):
            raise ModelError(
                f"the condition '{self.expression or 'condition'}' must be a bool scalar",
                facts=[f"got {choice.type}"],
                hint="compare it with a number, or reduce it with any() or all()",
            )
        return choice

    def _branch(self, context: Context, bindings: Mapping[str, Any], is_then: bool) -> tuple[Any, ...]:
        """Return the outputs of a branch; a condition ``is_training`` sets the training mode within the branches."""
        training = context.training
        if self.expression is not None and self.expression.text.strip() == TRAINING_FLAG:
            context.training = is_then
        try:
            block, block_name = (self.then, "then") if is_then else (self.otherwise, "else")
            outputs = block.run(context, bindings, block_name)
        finally:
            context.training = training
        return tuple(outputs[name] for name in self.outputs)


class While(Layer):
    """A loop that runs ``body`` while ``condition`` is true.

    ``initial_state`` maps each loop variable to its initial value: the name of a terminal, a connection, a number or
    an array. ``loop_vars`` maps loop variables to their updates, expressions of loop variables, terminals of the body
    and other names. ``output_vars`` maps output names to loop variables. All other names that the body or an
    expression uses are inputs, constant during the loop. ``max_trips`` limits the number of iterations; gradients
    require it.
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
        for argument, names in (("loop_vars", loop_vars), ("output_vars", self.results.values())):
            for name in names:
                self._check_variable(argument, name)
        terminals = self.body.model.connections
        self.read = tuple(  # terminals of the body that the updates use
            dict.fromkeys(
                n
                for e in self.updates.values()
                for n in e.names
                if n in terminals and terminals[n].origin.step is not None
            )
        )
        self.outputs = tuple(self.results)
        self.inputs = self._inputs()

    def _check_variable(self, argument: str, name: str) -> None:
        if name not in self.variables:
            suggestions = closest(name, self.variables, 1)
            raise ModelError(
                f"While: '{name}' in {argument} is not a loop variable",
                facts=[f"initial_state has {', '.join(self.variables) or 'none'}"],
                hint=f"did you mean '{suggestions[0]}'?" if suggestions else None,
            )

    def _inputs(self) -> tuple[str, ...]:
        """Return the names that the enclosing model provides: initial values, then loop invariants."""
        names: dict[str, None] = {}
        self.connected: dict[str, Any] = {}
        for variable, initial in self.initial.items():
            if isinstance(initial, str):
                names[initial] = None
            elif isinstance(initial, Connection):
                names[f"initial_{variable}"] = None
                self.connected[f"initial_{variable}"] = initial
        local_names = {*self.variables, *self.read}
        self.invariants = tuple(
            dict.fromkeys(
                name
                for name in [
                    *self.condition.names,
                    *(n for e in self.updates.values() for n in e.names),
                    *self.body.inputs,
                ]
                if name not in local_names
            )
        )
        names.update(dict.fromkeys(self.invariants))
        return tuple(names)

    @property
    def default_bindings(self) -> Mapping[str, Any]:
        return self.connected

    @property
    def standard(self) -> tuple[str, ...]:
        return ()

    def expects(self, terminal: str) -> Any:
        """Return a scalar shape for names that only the condition uses, with an integer dtype if all variables are."""
        if terminal not in self.condition.names or terminal in self.body.inputs or terminal in self.initial.values():
            return None
        counts = all(type(self.initial[n]) is int for n in self.condition.names if n in self.initial)
        return (), "int32" if counts else None

    def build(self, *values: Any) -> Any:
        from mithril.ops import while_loop

        context = self.context
        bindings = dict(zip(self.inputs, values, strict=True))
        fixed = {name: bindings[name] for name in self.invariants}
        start = [context.as_value(self._first(variable, bindings)) for variable in self.variables]

        def named(carried: tuple[Any, ...]) -> dict[str, Any]:
            return fixed | dict(zip(self.variables, carried, strict=False))

        def round_(carried: tuple[Any, ...]) -> list[Any]:
            values_before = named(carried)
            body_values = self.body.run(context, values_before, "body", self.read) if self.read else {}
            values_after = values_before | body_values
            return [
                _cast_to_variable(v, self.updates[n].value(values_after)) if n in self.updates else v
                for v, n in zip(carried, self.variables, strict=False)
            ]

        states = updated_states(context, lambda: round_(tuple(start)))
        start += [context.states[name] for name in states]

        def test(carried: tuple[Any, ...]) -> Any:
            return context.as_value(self.condition.value(named(carried)))

        def body(carried: tuple[Any, ...]) -> tuple[Any, ...]:
            outer_states = dict(context.states)
            context.states.update(zip(states, carried[len(self.variables) :], strict=True))
            updated = tuple(with_states(context, states, lambda: round_(carried)))
            context.states.update(outer_states)
            return updated

        last = while_loop(test, body, tuple(start), max_trips=self.max_trips)
        if self.max_trips is not None:
            nodes = Builder.current().nodes
            nodes[-1] = nodes[-1].replaced(tags={**nodes[-1].tags, BOUNDED: type(self).__name__})
        last = tuple(last) if isinstance(last, (tuple, list)) else (last,)
        for name, value in zip(states, last[len(self.variables) :], strict=True):
            context.states[name] = context.updated[name] = value
        final = dict(zip(self.variables, last, strict=False))
        return tuple(final[variable] for variable in self.results.values())

    def _first(self, variable: str, bindings: Mapping[str, Any]) -> Any:
        initial = self.initial[variable]
        if isinstance(initial, str):
            return bindings[initial]
        if isinstance(initial, Connection):
            return bindings[f"initial_{variable}"]
        return np.asarray(initial) if isinstance(initial, list) else initial


def _cast_to_variable(carried: Value, update: Any) -> Any:
    """Return the update as a value; Python numbers become constants of the variable's dtype."""
    if isinstance(update, Value):
        return update
    return Builder.current().constant(update, carried.dtype)
