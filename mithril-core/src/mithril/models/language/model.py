"""Models: layers wired together by names and connections. A model is a layer itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

from mithril.backend import checked
from mithril.base import ModelError, closest
from mithril.models.language.connection import NO_DEFAULT, Connection, Connections, IOKey, Step, snake_case
from mithril.models.language.layer import Layer
from mithril.models.language.source_location import here
from mithril.models.language.trace_context import Context


class Model(Layer):
    """A block made of other blocks.

    ``model |= layer(input="x", output="h")`` wires by name only; ``model += layer`` also connects the layer's first
    free input to what the previous layer gave. A name nobody produces is an input of the model.
    """

    output_alias = True
    # Running a model inside a trace, and its summary; filled by ``trace`` and ``model_summary``.
    _run: ClassVar[Callable[[Model, Context, Sequence[Any]], tuple[Any, ...]]]
    _summarize: ClassVar[Callable[..., str]]

    def __init__(self, *layers: Layer | Connection) -> None:
        self.steps: list[Step] = []
        self.connections: dict[str, Connection] = {}  # the latest under each name
        self.inputs_by_name: dict[str, Connection] = {}
        self.layer_names: set[str] = set()
        self.numbers: dict[str, int] = {}
        self.chosen_outputs: dict[str, Connection] | None = None
        self.declared_inputs: tuple[str, ...] | None = None
        self.reordered = False  # a name was read before it was produced
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
            item = Step(item, (), {}, here())
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
                facts=[f"at {here()}", "accepted: layers, called or not, and connections"],
            )
        self.adopt(item, chain=chain)

    def adopt(self, step: Step, *, chain: bool = False) -> None:
        """Make a step, and those it depends on that belong to no model yet, part of this model."""
        if step.model is not None:
            if step.model is not self:
                raise ModelError(
                    f"layer '{step.label}' already belongs to another model",
                    facts=[f"made at {step.place}"],
                    hint="add the layer itself, or the other model as a block",
                )
            return
        found: dict[int, Step] = {}
        pending = [step]
        while pending:
            current = pending.pop()
            if current.serial not in found:
                found[current.serial] = current
                pending += [s for c in current.sources() if (s := c.origin.step) is not None and s.model is None]
        for serial in sorted(found):
            chain = self._add(found[serial], chain)

    def _add(self, step: Step, chain: bool) -> bool:
        """Enter one step; whether a chained input is still waiting for a place."""
        layer = step.layer
        if layer is self:
            raise ModelError("a model cannot contain itself", facts=[f"at {step.place}"])
        step.name = self._layer_name(step)
        step.model = self
        bindings = step.bindings
        for terminal in layer.inputs:
            given = bindings.get(terminal)
            if given is None:
                if chain and self.steps and terminal in layer.standard:
                    bindings[terminal] = self._last(step)
                    chain = False
                else:
                    bindings[terminal] = self._named(terminal)
            else:
                bindings[terminal] = self._resolved(given, step)
        for terminal in bindings:
            if terminal not in layer.inputs:
                bindings[terminal] = self._resolved(bindings[terminal], step)
        for terminal, connection in step.results.items():
            connection.model = self
            wanted = step.wanted.get(terminal, layer.implicit_names.get(terminal))
            if wanted is not None:
                self._produce(wanted, connection, step)
        self.steps.append(step)
        return chain

    def _last(self, step: Step) -> Connection:
        previous = self.steps[-1]
        results = previous.results
        if not results:
            raise ModelError(f"'{previous.label}' before '{step.label}' has no output", facts=[f"at {step.place}"])
        return next(iter(results.values())).origin

    def _layer_name(self, step: Step) -> str:
        wanted = step.layer.name
        if wanted is not None:
            if wanted not in self.layer_names:
                self.layer_names.add(wanted)
                return wanted
            if any(s.layer is step.layer for s in self.steps):  # the same layer again: it shares its parameters
                return self._numbered(wanted)
            other = next(s for s in self.steps if s.name == wanted)
            raise ModelError(
                f"two layers are named '{wanted}'",
                facts=[f"{other.layer!r} at {other.place}", f"{step.layer!r} at {step.place}"],
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
        found = self.connections.get(name)
        if found is None:
            if self.declared_inputs is not None and name not in self.declared_inputs and not optional:
                near = closest(name, self.connections, 1)
                raise ModelError(
                    f"there is no terminal '{name}'",
                    facts=[f"at {here()}", f"inputs: {', '.join(self.declared_inputs)}"],
                    hint=f"did you mean '{near[0]}'?" if near else None,
                )
            found = Connection(name)
            found.model = self
            found.key = IOKey(name)
            self.connections[name] = self.inputs_by_name[name] = found
        return found.origin

    def _input(self, key: IOKey) -> Connection:
        """The input that an IOKey declares."""
        if not key.name:
            key.name = self._numbered("input")
        found = self._named(key.name, optional=key.trainable or key.default is not NO_DEFAULT)
        found.key = key if found.key is None else found.key.merged(key)
        key.alias = found if found is not key else None
        return found

    def _resolved(self, given: Any, step: Step) -> Any:
        if isinstance(given, str):
            return self._named(given)
        if not isinstance(given, Connection):
            return given
        origin = given.origin
        if origin.model is self:
            return origin
        if origin.model is not None:
            raise ModelError(
                f"layer '{step.label}' reads '{given.label}', which belongs to another model",
                facts=[f"at {step.place}", f"'{given.label}' was made at {given.place}"],
                hint="pass it in through an input of the model",
            )
        key = origin if isinstance(origin, IOKey) else IOKey(origin.name)
        return self._input(key)

    def _produce(self, wanted: str | IOKey, connection: Connection, step: Step) -> None:
        name = wanted if isinstance(wanted, str) else wanted.name
        if not name and isinstance(wanted, IOKey):
            connection.key, wanted.alias = wanted, connection
            return
        if not name:
            raise ModelError(f"an output of '{step.label}' has an empty name", facts=[f"at {step.place}"])
        connection.name = name
        before = self.connections.get(name)
        if before is not None:
            self._replace(before, connection, step)
        if isinstance(wanted, IOKey):
            connection.key = wanted if connection.key is None else connection.key.merged(wanted)
            wanted.alias = connection
        self.connections[name] = connection

    def _replace(self, before: Connection, connection: Connection, step: Step) -> None:
        """A name that is in use gets a producer (it was read too early) or, in place, a new value."""
        name = connection.name
        reads = any(b is before.origin for b in step.sources())
        if getattr(step.layer, "in_place", False) and reads:
            return
        if before.origin.step is not None:
            other = before.origin.step
            raise ModelError(
                f"'{name}' has two producers",
                facts=[f"layer '{other.label}' at {other.place}", f"layer '{step.label}' at {step.place}"],
                hint="give the second output another name"
                + (", or say in_place=True" if reads and hasattr(step.layer, "in_place") else ""),
            )
        if reads:
            raise ModelError(
                f"layer '{step.label}' reads and writes '{name}'",
                facts=[f"at {step.place}"],
                hint="give the output another name"
                + (", or say in_place=True" if hasattr(step.layer, "in_place") else ""),
            )
        connection.key = before.key
        before.alias = connection
        self.inputs_by_name.pop(name, None)
        self.reordered = True

    # -- what it looks like from outside -----------------------------------------------------------------------------
    @property
    def inputs(self) -> tuple[str, ...]:  # type: ignore[override]
        """Names the model reads and nobody inside produces, in order of appearance; trainable ones are parameters."""
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
        """The outputs: those asked for, else chosen, else exposed, else named output*, else named and unread."""
        if names is not None:
            return {name: self.terminal(name) for name in names}
        if self.chosen_outputs is not None:
            return {name: c.origin for name, c in self.chosen_outputs.items()}
        made = {n: c for n, c in self.connections.items() if c.origin.step is not None}
        exposed = {n: c for n, c in made.items() if c.key is not None and c.key.expose}
        if exposed:
            return exposed
        if found := {n: c for n, c in made.items() if n.startswith("output")}:
            return found
        read = {id(s.origin) for step in self.steps for s in step.sources()}
        if found := {n: c for n, c in made.items() if id(c.origin) not in read}:
            return found
        if self.steps and self.steps[-1].results:
            return {"output": next(iter(self.steps[-1].results.values()))}
        return {}

    def terminal(self, name: str) -> Connection:
        """The connection of a name; the nearest names are shown where there is none."""
        found = self.connections.get(name)
        if found is None:
            if name in (outputs := self.output_connections()):
                return outputs[name]
            near = closest(name, self.connections, 1)
            raise ModelError(
                f"the model has no terminal '{name}'",
                facts=[f"at {here()}", f"terminals: {', '.join(self.connections) or 'none'}"],
                hint=f"did you mean '{near[0]}'?" if near else None,
            )
        return found.origin

    __getitem__ = terminal

    @checked()
    def set_outputs(self, *names: str | Connection, **named: str | Connection) -> Model:
        """Choose the outputs; keywords give them new names."""
        chosen = {n if isinstance(n, str) else n.label: n for n in names} | dict(named)
        self.chosen_outputs = {}
        for label, given in chosen.items():
            if isinstance(given, Connection) and given.origin.step is not None:
                self.adopt(given.origin.step)
            self.chosen_outputs[label] = self.terminal(given) if isinstance(given, str) else given.origin
        return self

    @checked()
    def input(self, name: str, **declared: Any) -> Connection:
        """An input of the model, to wire with; keywords as for IOKey."""
        return self._input(IOKey(name, **declared))

    @classmethod
    def create(cls, inputs: Any = None, outputs: Any = None, *, name: str | None = None, **more: Connection) -> Model:
        """The model between some inputs and outputs, written with layers called on connections.

        ``outputs`` is a connection, a list, or a dictionary that names them; further keywords name outputs too.
        """
        model = Model()
        model.name = name
        for key in _named_keys(inputs):
            model._input(key)
        if inputs is not None:
            model.declared_inputs = tuple(model.inputs_by_name)
        wanted = _named_outputs(outputs) | _named_outputs(more)
        if not wanted:
            raise ModelError("a model needs outputs", facts=[f"at {here()}"], hint="Model.create(outputs=y)")
        for connection in wanted.values():
            step = connection.origin.step
            if step is not None:
                model.adopt(step)
        model.chosen_outputs = {label: c.origin for label, c in wanted.items()}
        for label, c in wanted.items():
            model.connections.setdefault(label, c.origin)
        return model

    def build(self, *values: Any) -> Any:
        """The model as a layer inside another layer's build."""
        results = Model._run(self, self.context, values)
        return results[0] if len(results) == 1 else results

    # -- looking -----------------------------------------------------------------------------------------------------
    @checked()
    def summary(
        self,
        shapes: Mapping[str, Any] | None = None,
        *,
        types: Mapping[str, Any] | None = None,
        width: int | None = None,
    ) -> str:
        """A table by depth: layers and parameters, and with ``shapes`` of the inputs results, operations and memory."""
        return Model._summarize(self, shapes, types, width)

    def _repr_html_(self) -> str:
        import html

        return f"<pre>{html.escape(self.summary())}</pre>"

    def __repr__(self) -> str:
        name = f" '{self.name}'" if self.name else ""
        return (
            f"<{type(self).__name__}{name}: {len(self.steps)} layers, "
            f"inputs {', '.join(self.inputs) or 'none'}, outputs {', '.join(self.outputs) or 'none'}>"
        )


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
    for label, given in items:
        key = IOKey(given) if isinstance(given, str) else given
        if not isinstance(key, IOKey):
            raise ModelError(
                f"an input of a model cannot be a {type(given).__name__}",
                facts=[f"at {here()}", "accepted: IOKeys and names"],
            )
        if label is not None:
            key.name = label
        keys.append(key)
    return keys


def _named_outputs(outputs: Any) -> dict[str, Connection]:
    if outputs is None:
        return {}
    if isinstance(outputs, Mapping):
        found = dict(outputs)
    else:
        listed = _listed(outputs)
        plain = ["output"] if len(listed) == 1 else [f"output{k}" for k in range(len(listed))]
        found = {getattr(c, "name", "") or label: c for label, c in zip(plain, listed, strict=True)}
    for label, c in found.items():
        if not isinstance(c, Connection):
            raise ModelError(
                f"output '{label}' of a model cannot be a {type(c).__name__}",
                facts=[f"at {here()}", "accepted: connections"],
            )
    return found


def _listed(given: Any) -> list[Any]:
    return list(given) if isinstance(given, (list, tuple)) else [given]
