"""Changing the terminals of a wired model: giving them other names, and merging several into one."""

from __future__ import annotations

from collections.abc import Sequence

from mithril.graph import ModelError
from mithril.models.language.connection import Connection
from mithril.models.language.model import Model
from mithril.models.language.source_location import user_location


def rename(model: Model, terminal: str | Connection, name: str) -> None:
    """Give a terminal of the model another name; pretrained arrays of a parameter follow it."""
    old = terminal if isinstance(terminal, str) else terminal.label
    connection = _of(model, terminal)
    if not name.isidentifier():
        raise ModelError(
            f"'{name}' cannot name a terminal",
            facts=[f"at {user_location()}"],
            hint="use an identifier such as 'image'",
        )
    existing = model.connections.get(name)
    if existing is not None and existing.origin is not connection:
        raise ModelError(
            f"the model has a terminal '{name}' already",
            facts=[f"at {user_location()}", f"'{name}' was created at {existing.location}"],
            hint=f"model.merge('{name}', '{old}') makes one of them, or choose another name",
        )
    previous, outputs = connection.name, model.output_connections()
    for table in (model.connections, model.inputs_by_name, model.chosen_outputs or {}):
        renamed = {name if n in (previous, old) and c.origin is connection else n: c for n, c in table.items()}
        table.clear()
        table.update(renamed)
    model.connections[name] = connection
    if model.declared_inputs is not None:
        model.declared_inputs = tuple(name if n == previous else n for n in model.declared_inputs)
    if previous in model.pretrained and connection.step is None:
        model.pretrained = {name if n == previous else n: x for n, x in model.pretrained.items()}
    connection.name = name
    if connection.key is not None:
        connection.key.name = name
    expected = {name if c.origin is connection else n: c.origin for n, c in outputs.items()}
    if model.output_connections() != expected:  # names such as "output" select the outputs
        model.chosen_outputs = expected


def merge(model: Model, terminals: Sequence[str | Connection], name: str | None) -> None:
    """Make one terminal of several: inputs become one input, and a value that a layer produces replaces inputs."""
    merged = list(dict.fromkeys(_of(model, t) for t in terminals))
    if len(merged) < 2:
        raise ModelError("merge needs two different terminals", facts=[f"at {user_location()}"])
    produced = [c for c in merged if c.step is not None]
    if len(produced) > 1:
        first, second = (f"'{c.label}' by layer '{c.step.label}'" for c in produced[:2] if c.step is not None)
        raise ModelError(
            "two values that layers produce cannot become one terminal",
            facts=[f"at {user_location()}", f"produced: {first}, {second}"],
            hint="combine them by a layer such as Add",
        )
    target = produced[0] if produced else merged[0]
    key = target.key
    for c in merged:
        if c is not target and c.key is not None:
            key = c.key if key is None else key.merged(c.key)
    inputs = [c for c in merged if c is not target]
    _check_order(target, inputs)
    for c in inputs:
        c.alias = target
    replaced = {id(c) for c in inputs}
    model.connections = {n: c for n, c in model.connections.items() if id(c) not in replaced}
    model.inputs_by_name = {n: c for n, c in model.inputs_by_name.items() if id(c) not in replaced}
    if model.chosen_outputs is not None:
        model.chosen_outputs = {n: c.origin for n, c in model.chosen_outputs.items()}
    if model.declared_inputs is not None:
        model.declared_inputs = tuple(n for n in model.declared_inputs if n in model.connections)
    target.key = key
    model.reordered = model.reordered or target.step is not None
    if name is not None and name != target.name:
        rename(model, target, name)
    elif not target.name:
        rename(model, target, inputs[0].name)


def _of(model: Model, terminal: str | Connection) -> Connection:
    connection = model.terminal(terminal) if isinstance(terminal, str) else terminal.origin
    if connection.model is not model:
        raise ModelError(
            f"'{connection.label}' belongs to another model",
            facts=[f"at {user_location()}", f"terminals: {', '.join(model.connections) or 'none'}"],
        )
    return connection


def _check_order(target: Connection, inputs: Sequence[Connection]) -> None:
    """Raise ModelError if the layer that produces ``target`` depends on one of the inputs that it replaces."""
    pending, seen = [target], set[int]()
    while pending:
        origin = pending.pop().origin
        if any(origin is c for c in inputs):
            raise ModelError(
                f"'{origin.label}' cannot become '{target.label}', which is computed from it",
                facts=[f"at {user_location()}", f"'{target.label}' is computed at {target.location}"],
                hint="use While or scan for a loop",
            )
        if origin.step is not None and origin.step.serial not in seen:
            seen.add(origin.step.serial)
            pending += origin.step.sources()


Model._rename_terminal = staticmethod(rename)
Model._merge_terminals = staticmethod(merge)
