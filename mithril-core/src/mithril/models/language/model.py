"""Models: layers wired together by names and connections. A model is itself a layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

from mithril.backend import checked
from mithril.graph import ModelError, closest, visible
from mithril.models.language.connection import NO_DEFAULT, Connection, Connections, IOKey, Step, snake_case
from mithril.models.language.layer import Layer
from mithril.models.language.source_location import user_location

_APART = "create the expression once for each, as in a function: it belongs to the first model that uses it"


class Model(Layer):
    """A block composed of other blocks.

    ``model |= layer(input="x", output="h")`` wires by name only. ``model += layer`` also connects the layer's first
    unbound input to the output of the previous layer. A name that no layer produces is an input of the model.
    """

    output_alias = True

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        for name in ("build", "forward"):
            if name in vars(cls):
                raise ModelError(
                    f"class {cls.__name__} has a method '{name}', which models do not call: they are made of layers",
                    hint=f"class {cls.__name__}(Layer) with build(self, x) computes with operations and layers",
                )

    def __init__(self, *layers: Layer | Connection, name: str | None = None) -> None:  # the metaclass sets the name
        self.steps: list[Step] = []
        self.connections: dict[str, Connection] = {}  # name -> latest connection of that name
        self.inputs_by_name: dict[str, Connection] = {}
        self.layer_names: set[str] = set()
        self.numbers: dict[str, int] = {}
        self.chosen_outputs: dict[str, Connection] | None = None
        self.declared_inputs: tuple[str, ...] | None = None
        self.reordered = False  # whether a name was used before a layer produced it
        for layer in layers:
            self += layer

    # -- wiring ------------------------------------------------------------------------------------------------------
    def __ior__(self, item: Any) -> Self:
        self._add_item(item, chain=False)
        return self

    def __iadd__(self, item: Any) -> Self:
        self._add_item(item, chain=True)
        return self

    def _add_item(self, item: Any, chain: bool) -> None:
        if isinstance(item, Layer):
            item = Step(item, (), {}, user_location())
        elif isinstance(item, Connections):
            item = item[0].step
        elif isinstance(item, IOKey):
            self._input(item)
            return
        elif isinstance(item, Connection):
            item = item.origin.step
        if not isinstance(item, Step):
            raise ModelError(
                f"a {type(item).__name__} cannot be added to a model",
                facts=[f"at {user_location()}", "accepted: layers, results of calling layers, and connections"],
            )
        self.attach(item, chain=chain)

    def attach(self, step: Step, *, chain: bool = False) -> None:
        """Add a step to this model, with the steps it depends on that do not belong to a model yet."""
        if step.model is not None:
            if step.model is not self:
                raise ModelError(
                    f"layer '{step.label}' already belongs to another model",
                    facts=[f"created at {step.location}", *step.reason_of_model()],
                    hint=_APART
                    if step.membership is not None
                    else "add the layer itself, or the other model as a block",
                )
            return
        pending_steps: dict[int, Step] = {}
        pending = [step]
        while pending:
            current = pending.pop()
            if current.serial not in pending_steps:
                pending_steps[current.serial] = current
                pending += [s for c in current.sources() if (s := c.origin.step) is not None and s.model is None]
        for serial in sorted(pending_steps):
            chain = self._add(pending_steps[serial], chain)

    def _add(self, step: Step, chain: bool) -> bool:
        """Add one step; return whether the output of the previous step is still to be connected."""
        layer = step.layer
        if layer is self:
            raise ModelError("a model cannot contain itself", facts=[f"at {step.location}"])
        step.name = self._layer_name(step)
        step.model = self
        bindings = step.bindings
        for terminal in layer.inputs:
            source = bindings.get(terminal)
            if source is None:
                if chain and self.steps and terminal in layer.standard:
                    bindings[terminal] = self._last(step)
                    chain = False
                else:
                    bindings[terminal] = self._named(terminal)
            else:
                bindings[terminal] = self._resolved(source, step)
        for terminal in bindings:
            if terminal not in layer.inputs:
                bindings[terminal] = self._resolved(bindings[terminal], step)
        for terminal, connection in step.results.items():
            connection.model = self
            requested = step.requested.get(terminal, layer.implicit_names.get(terminal))
            if requested is not None:
                self._produce(requested, connection, step)
        self.steps.append(step)
        return chain

    def _last(self, step: Step) -> Connection:
        previous = self.steps[-1]
        results = previous.results
        if not results:
            raise ModelError(f"'{previous.label}' before '{step.label}' has no output", facts=[f"at {step.location}"])
        return next(iter(results.values())).origin

    def _layer_name(self, step: Step) -> str:
        requested = step.layer.name
        if requested is not None:
            if requested not in self.layer_names:
                self.layer_names.add(requested)
                return requested
            # The same layer applied again shares its parameters.
            if any(s.layer is step.layer for s in self.steps):
                return self._numbered(requested)
            other = next(s for s in self.steps if s.name == requested)
            raise ModelError(
                f"two layers are named '{requested}'",
                facts=[f"{other.layer!r} at {other.location}", f"{step.layer!r} at {step.location}"],
            )
        return self._numbered(step.name or snake_case(type(step.layer).__name__))

    def _numbered(self, stem: str) -> str:
        n = self.numbers.get(stem, 0)
        while (name := f"{stem}_{n}" if n else stem) in self.layer_names:
            n += 1
        self.numbers[stem] = n + 1
        self.layer_names.add(name)
        return name

    def _named(self, name: str, optional: bool = False) -> Connection:
        connection = self.connections.get(name)
        if connection is None:
            if self.declared_inputs is not None and name not in self.declared_inputs and not optional:
                suggestions = closest(name, self.connections, 1)
                raise ModelError(
                    f"there is no terminal '{name}'",
                    facts=[f"at {user_location()}", f"inputs: {', '.join(self.declared_inputs)}"],
                    hint=f"did you mean '{suggestions[0]}'?" if suggestions else None,
                )
            connection = Connection(name)
            connection.model = self
            connection.key = IOKey(name)
            self.connections[name] = self.inputs_by_name[name] = connection
        return connection.origin

    def _input(self, key: IOKey) -> Connection:
        """Return the input that an IOKey declares, adding it if necessary."""
        if not key.name:
            key.name = self._numbered("input")
        connection = self._named(key.name, optional=key.trainable or key.default is not NO_DEFAULT)
        connection.key = key if connection.key is None else connection.key.merged(key)
        key.alias = connection if connection is not key else None
        return connection

    def _resolved(self, source: Any, step: Step) -> Any:
        if isinstance(source, str):
            return self._named(source)
        if not isinstance(source, Connection):
            return source
        origin = source.origin
        if origin.model is self:
            return origin
        if isinstance(source, IOKey) and origin.step is None:
            return self._input(source)  # a key that declares an input of another model declares one here, too
        if origin.model is not None:
            raise ModelError(
                f"layer '{step.label}' uses '{source.label}', which belongs to another model",
                facts=[f"at {step.location}", f"'{source.label}' was created at {source.location}"],
                hint="pass it through an input of the model",
            )
        key = origin if isinstance(origin, IOKey) else IOKey(origin.name)
        return self._input(key)

    def _produce(self, requested: str | IOKey, connection: Connection, step: Step) -> None:
        name = requested if isinstance(requested, str) else requested.name
        if not name and isinstance(requested, IOKey):
            connection.key, requested.alias = requested, connection
            return
        if not name:
            raise ModelError(f"an output of '{step.label}' has an empty name", facts=[f"at {step.location}"])
        connection.name = name
        existing = self.connections.get(name)
        if existing is not None:
            self._replace(existing, connection, step)
        if isinstance(requested, IOKey):
            connection.key = requested if connection.key is None else connection.key.merged(requested)
            requested.alias = connection
        self.connections[name] = connection

    def _replace(self, existing: Connection, connection: Connection, step: Step) -> None:
        """Replace a connection that was used before it was produced; an in-place layer replaces its operand."""
        name = connection.name
        reads = any(b is existing.origin for b in step.sources())
        if getattr(step.layer, "in_place", False) and reads:
            return
        if existing.origin.step is not None:
            other = existing.origin.step
            raise ModelError(
                f"'{name}' has two producers",
                facts=[
                    f"layer '{other.label}' at {other.location}",
                    f"layer '{step.label}' at {step.location}",
                    *step.reason_of_model(),
                ],
                hint="give the second output another name"
                + (", or set in_place=True" if reads and hasattr(step.layer, "in_place") else "")
                + (f"; for two models, {_APART}" if step.membership is not None else ""),
            )
        if reads:
            raise ModelError(
                f"layer '{step.label}' reads and writes '{name}'",
                facts=[f"at {step.location}"],
                hint="give the output another name"
                + (", or set in_place=True" if hasattr(step.layer, "in_place") else ""),
            )
        connection.key = existing.key
        existing.alias = connection
        self.inputs_by_name.pop(name, None)
        self.reordered = True

    # -- interface of the model as a layer ---------------------------------------------------------------------------
    @property
    def inputs(self) -> tuple[str, ...]:  # type: ignore[override]
        """Names that the model uses but does not produce, in order of appearance, without trainable ones."""
        return tuple(n for n, c in self.inputs_by_name.items() if _kind(c) == "input")

    @property
    def optional(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(n for n, c in self.inputs_by_name.items() if _kind(c) == "default")

    @property
    def weights(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(n for n, c in self.inputs_by_name.items() if _kind(c) == "param")

    @property
    def outputs(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(self.output_connections())

    def terminals(self) -> list[str]:
        return list(dict.fromkeys([*self.inputs_by_name, *self.connections, *self.outputs]))

    def output_connections(self, names: Sequence[str] | None = None) -> dict[str, Connection]:
        """Return the outputs: ``names``, else those set, else exposed, else named output*, else named and unused."""
        if names is not None:
            return {name: self.terminal(name) for name in names}
        if self.chosen_outputs is not None:
            return {name: c.origin for name, c in self.chosen_outputs.items()}
        produced = {n: c for n, c in self.connections.items() if c.origin.step is not None}
        exposed = {n: c for n, c in produced.items() if c.key is not None and c.key.expose}
        if exposed:
            return exposed
        if candidates := {n: c for n, c in produced.items() if n.startswith("output")}:
            return candidates
        read = {id(s.origin) for step in self.steps for s in step.sources()}
        if candidates := {n: c for n, c in produced.items() if id(c.origin) not in read}:
            return candidates
        if self.steps and self.steps[-1].results:
            return {"output": next(iter(self.steps[-1].results.values()))}
        return {}

    def terminal(self, name: str) -> Connection:
        """Return the connection of that name; the error for an unknown name suggests the closest one."""
        connection = self.connections.get(name)
        if connection is None:
            if name in (outputs := self.output_connections()):
                return outputs[name]
            suggestions = closest(name, self.connections, 1)
            raise ModelError(
                f"the model has no terminal '{name}'",
                facts=[f"at {user_location()}", f"terminals: {', '.join(self.connections) or 'none'}"],
                hint=f"did you mean '{suggestions[0]}'?" if suggestions else None,
            )
        return connection.origin

    __getitem__ = terminal

    @checked()
    def set_outputs(self, *names: str | Connection, **named: str | Connection) -> Model:
        """Select the outputs; keywords rename them. Returns the model."""
        requested = {n if isinstance(n, str) else n.label: n for n in names} | dict(named)
        self.chosen_outputs = {}
        for label, source in requested.items():
            if isinstance(source, Connection) and source.origin.step is not None:
                self.attach(source.origin.step)
            self.chosen_outputs[label] = self.terminal(source) if isinstance(source, str) else source.origin
        return self

    @checked()
    def rename(self, terminal: str | Connection, name: str) -> Self:
        """Give an input, an output or another named value a new name. Returns the model.

        A model that contains this one as a block refers to terminals by name: rename before adding it.
        """
        old = terminal if isinstance(terminal, str) else terminal.label
        connection = self._own(terminal)
        if not name.isidentifier():
            raise ModelError(
                f"'{name}' cannot name a terminal",
                facts=[f"at {user_location()}"],
                hint="use an identifier such as 'image'",
            )
        existing = self.connections.get(name)
        if existing is not None and existing.origin is not connection:
            raise ModelError(
                f"the model has a terminal '{name}' already",
                facts=[f"at {user_location()}", f"'{name}' was created at {existing.location}"],
                hint=f"model.merge('{name}', '{old}') makes one of them, or choose another name",
            )
        previous, outputs = connection.name, self.output_connections()
        for table in (self.connections, self.inputs_by_name, self.chosen_outputs or {}):
            renamed = {name if n in (previous, old) and c.origin is connection else n: c for n, c in table.items()}
            table.clear()
            table.update(renamed)
        self.connections[name] = connection
        if self.declared_inputs is not None:
            self.declared_inputs = tuple(name if n == previous else n for n in self.declared_inputs)
        if previous in self.pretrained and connection.step is None:
            self.pretrained = {name if n == previous else n: x for n, x in self.pretrained.items()}
        connection.name = name
        if connection.key is not None:
            connection.key.name = name
        expected = {name if c.origin is connection else n: c.origin for n, c in outputs.items()}
        if self.output_connections() != expected:  # names such as "output" select the outputs
            self.chosen_outputs = expected
        return self

    @checked()
    def merge(self, *terminals: str | Connection, name: str | None = None) -> Self:
        """Make one terminal of several, named as the first or ``name``. Returns the model.

        Inputs become one input. At most one terminal may be the result of a layer; it then replaces the inputs.
        """
        merged = list(dict.fromkeys(self._own(t) for t in terminals))
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
        self.connections = {n: c for n, c in self.connections.items() if id(c) not in replaced}
        self.inputs_by_name = {n: c for n, c in self.inputs_by_name.items() if id(c) not in replaced}
        if self.chosen_outputs is not None:
            self.chosen_outputs = {n: c.origin for n, c in self.chosen_outputs.items()}
        if self.declared_inputs is not None:
            self.declared_inputs = tuple(n for n in self.declared_inputs if n in self.connections)
        target.key = key
        self.reordered = self.reordered or target.step is not None
        if name is not None and name != target.name:
            self.rename(target, name)
        elif not target.name:
            self.rename(target, inputs[0].name)
        return self

    def _own(self, terminal: str | Connection) -> Connection:
        connection = self.terminal(terminal) if isinstance(terminal, str) else terminal.origin
        if connection.model is not self:
            raise ModelError(
                f"'{connection.label}' belongs to another model",
                facts=[f"at {user_location()}", f"terminals: {', '.join(self.connections) or 'none'}"],
            )
        return connection

    @checked()
    def input(self, name: str, **declared: Any) -> Connection:
        """Declare an input and return its connection; keywords as for IOKey."""
        return self._input(IOKey(name, **declared))

    @classmethod
    def create(cls, inputs: Any = None, outputs: Any = None, *, name: str | None = None, **more: Connection) -> Model:
        """Return the model between given inputs and outputs, wired by calling layers on connections.

        ``outputs`` is a connection, a list, or a dictionary from names to connections; further keywords name outputs.
        Of connections that belong to a model already, the new one gets copies with the same layers.
        """
        model = Model()
        model.name = name
        for key in _named_keys(inputs):
            model._input(key)
        if inputs is not None:
            model.declared_inputs = tuple(model.inputs_by_name)
        outputs_by_name = _without_owner(_named_outputs(outputs) | _named_outputs(more))
        if not outputs_by_name:
            raise ModelError("a model needs outputs", facts=[f"at {user_location()}"], hint="Model.create(outputs=y)")
        for connection in outputs_by_name.values():
            step = connection.origin.step
            if step is not None:
                model.attach(step)
        model.chosen_outputs = {label: c.origin for label, c in outputs_by_name.items()}
        for label, c in outputs_by_name.items():
            model.connections.setdefault(label, c.origin)
        return model

    def build(self, *values: Any) -> Any:
        """Run the model as a layer inside the build method of another layer."""
        from mithril.models.language.trace import run_model

        results = run_model(self, self.context, values)
        return results[0] if len(results) == 1 else results

    # -- display -----------------------------------------------------------------------------------------------------
    def __repr__(self) -> str:
        name = f" '{self.name}'" if self.name else ""
        return visible(
            f"<{type(self).__name__}{name}: {len(self.steps)} layers, "
            f"inputs {', '.join(self.inputs) or 'none'}, outputs {', '.join(self.outputs) or 'none'}>"
        )


def _without_owner(outputs: dict[str, Connection]) -> dict[str, Connection]:
    """Return the connections, or, if steps before them belong to a model, those of copies of all steps."""
    steps: dict[int, Step] = {}
    pending = list(outputs.values())
    while pending:
        step = pending.pop().origin.step
        if step is not None and step.serial not in steps:
            steps[step.serial] = step
            pending += step.sources()
    if all(step.model is None for step in steps.values()):
        return outputs
    copies: dict[Connection, Connection] = {}

    def copy(source: Any) -> Any:
        if not isinstance(source, Connection):
            return source
        origin = source.origin
        if origin not in copies:  # an input
            declared = origin if isinstance(origin, IOKey) else origin.key
            copies[origin] = IOKey(origin.name) if declared is None else declared.merged(IOKey(origin.name))
        return copies[origin]

    for _, step in sorted(steps.items()):  # in the order of their creation, so that sources come first
        bindings = {terminal: copy(source) for terminal, source in step.bindings.items()}
        new = Step(step.layer, (), bindings | step.requested, step.location)
        copies.update((step.results[terminal], result) for terminal, result in new.results.items())
    return {name: copy(connection) for name, connection in outputs.items()}


def _kind(connection: Connection) -> str:
    key = connection.key
    if key is None:
        return "input"
    return "param" if key.trainable else "input" if key.default is NO_DEFAULT else "default"


def _named_keys(inputs: Any) -> list[IOKey]:
    if inputs is None:
        return []
    items = inputs.items() if isinstance(inputs, Mapping) else [(None, i) for i in _listed(inputs)]
    keys = []
    for label, declaration in items:
        key = IOKey(declaration) if isinstance(declaration, str) else declaration
        if not isinstance(key, IOKey):
            raise ModelError(
                f"an input of a model cannot be a {type(declaration).__name__}",
                facts=[f"at {user_location()}", "accepted: IOKeys and names"],
            )
        if label is not None:
            key.name = label
        keys.append(key)
    return keys


def _named_outputs(outputs: Any) -> dict[str, Connection]:
    if outputs is None:
        return {}
    if isinstance(outputs, Mapping):
        connections = dict(outputs)
    else:
        listed = _listed(outputs)
        plain = ["output"] if len(listed) == 1 else [f"output{k}" for k in range(len(listed))]
        connections = {getattr(c, "name", "") or label: c for label, c in zip(plain, listed, strict=True)}
    for label, c in connections.items():
        if not isinstance(c, Connection):
            raise ModelError(
                f"output '{label}' of a model cannot be a {type(c).__name__}",
                facts=[f"at {user_location()}", "accepted: connections"],
            )
    return connections


def _listed(item: Any) -> list[Any]:
    return list(item) if isinstance(item, (list, tuple)) else [item]


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
