"""Models from dictionaries: every reference, name and size of the file is checked, and none of its text is run.

Classes are those of ``mithril.models``, public names of the packages of installed plugins or that these export from
``mithril``, and those that the caller passes as ``layers``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from mithril.graph import InputError, MithrilError, ModelError, __version__, limit, parsed_json, unknown
from mithril.models.language.apply_op import Apply, Take
from mithril.models.language.connection import Connection, Constant, IOKey, Step
from mithril.models.language.control_flow import Block, If, While
from mithril.models.language.layer import Layer, limited_construction
from mithril.models.language.model import Model
from mithril.models.language.source_location import user_location
from mithril.models.language.surgery import places
from mithril.models.saving.values import Reading, from_value, is_int, malformed
from mithril.models.saving.writing import FORMAT, VERSION

MOST_LAYERS = 100_000  # also counts layers that constructors create, and each use of a shared layer


def from_json(text: str | bytes | Path, layers: Iterable[type] = ()) -> Layer:
    """Return the layer that ``to_json`` wrote: ``text`` is the JSON, or the path of its file."""
    try:
        is_path = isinstance(text, str) and text.strip()[:1] not in ("{", "[", "")
        content = Path(str(text)).read_bytes() if is_path or isinstance(text, Path) else text
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read '{text!s:.100}'", facts=[str(error)], hint="pass JSON, or a path") from None
    try:
        data = parsed_json(content, "the saved model")
    except InputError as error:
        hint = error.hint or "write it with model.to_json()"
        raise ModelError("the text is not JSON", facts=[error.what, *error.facts], hint=hint) from None
    return from_dict(data, layers)


def from_dict(data: Mapping[str, Any], layers: Iterable[type] = ()) -> Layer:
    """Return the layer that ``to_dict`` described; ``layers`` are the classes of the caller's own layers."""
    if not isinstance(data, Mapping) or data.get("format") != FORMAT:
        raise ModelError(
            "the data are not a saved model", facts=[f"expected: format '{FORMAT}'"], hint="write with model.to_dict()"
        )
    version = data.get("version")
    if not is_int(version) or not 1 <= version <= VERSION:  # type: ignore[operator]  # it is an int
        raise ModelError(
            f"version {version!r:.40} of the format is not supported",
            facts=[f"written by mithril {data.get('mithril')!s:.20}; mithril {__version__} reads up to {VERSION}"],
            hint="install a newer mithril",
        )
    entries = data.get("layers")
    if not isinstance(entries, list) or len(entries) > MOST_LAYERS:
        raise malformed("layers", f"a list of at most {MOST_LAYERS:,} layers is expected")
    reader = _Reader(layers)
    with limited_construction(MOST_LAYERS):
        for number, entry in enumerate(entries):
            reader.add(entry, f"layers[{number}]")
    return reader.layer(data.get("root"), "root")


class _Reader(Reading):
    """The layers read so far. An entry refers to layers before it, so there are no cycles."""

    def __init__(self, classes: Iterable[type]) -> None:
        self.classes = {cls.__name__: cls for cls in classes}
        self.layers: list[Layer] = []
        self.sizes: list[int] = []  # number of layers inside, each use counted
        self.depths: list[int] = []
        self.used: set[int] = set()

    def layer(self, number: Any, location: str) -> Layer:
        if not is_int(number) or not 0 <= number < len(self.layers):
            raise malformed(location, f"there is no layer {number!r:.40} before")
        self.used.add(number)
        self.size += self.sizes[number]
        self.depth = max(self.depth, 1 + self.depths[number])
        if self.size > MOST_LAYERS or self.depth > limit("depth"):
            raise malformed(
                location, f"more than {MOST_LAYERS:,} layers, or more than {limit('depth')} inside each other"
            )
        layer: Layer = self.layers[number]
        return layer

    size, depth = 1, 0

    def add(self, entry: Any, location: str) -> None:
        """Read one entry."""
        self.size, self.depth = 1, 0
        if not isinstance(entry, dict):
            raise malformed(location, "an entry of a layer is expected")
        readers = {"Model": self._model, "Apply": self._apply, "If": self._if, "While": self._while}
        name = entry.get("class")
        try:
            layer = readers.get(str(name), self._layer)(entry, location)
            for label, number in _table(entry, "children", location).items():
                self._replace(layer, label, self.layer(number, location), location)
            if entry.get("name") is not None:
                layer.name = _text(entry["name"], f"{location}.name")
            for tag, value in _table(entry, "tags", location).items():
                layer.set_attribute(tag, value)
            if entry.get("frozen"):
                layer.freeze(*(_text(pattern, f"{location}.frozen") for pattern in entry["frozen"]))
        except (TypeError, ValueError, KeyError, AttributeError, IndexError, RecursionError, OverflowError) as error:
            raise malformed(location, f"{type(error).__name__}: {error}") from None
        except MithrilError as error:
            if error.what == "the saved model is malformed":
                raise
            raise error.with_facts(f"in the saved model at {location}") from None
        self.layers.append(layer)
        self.sizes.append(self.size)
        self.depths.append(self.depth)

    def class_of(self, name: Any, location: str) -> Any:
        from mithril import plugins

        library: Any = import_module("mithril.models")
        if isinstance(name, str) and (cls := self.classes.get(name.rpartition(":")[2])) is not None:
            return cls
        package, colon, short = _text(name, location).partition(":")
        if package == "mithril" and short in plugins.exports():
            exported = plugins.export(short)
            if isinstance(exported, type) and issubclass(exported, Layer):  # others may act when they are made
                return exported
        if colon:
            packages = {plugin.module.partition(".")[0] for plugin in plugins.all() if plugin.module}
            public = import_module(package) if package in packages else None
            if public is not None and short in getattr(public, "__all__", ()):
                return getattr(public, short)
            message, facts, _ = unknown("class", name, [])
            remedy = f"install the distribution of '{package}'" if public is None else f"update '{package}'"
            raise ModelError(message, facts=facts, hint=f"{remedy}, or pass layers=[...] with the class")
        if name not in library.__all__:
            accepted = [n for n in library.__all__ if n[:1].isupper()]
            message, facts, hint = unknown("layer", name, [*accepted, *self.classes])
            raise ModelError(
                message, facts=facts, hint=f"{f'{hint} Or ' if hint else ''}pass layers=[{name:.60}] with your class"
            )
        return getattr(library, name)

    def _layer(self, entry: dict[str, Any], location: str) -> Layer:
        cls = self.class_of(entry["class"], f"{location}.class")
        if not (isinstance(cls, type) and issubclass(cls, Layer)) or issubclass(cls, Model):
            raise malformed(location, f"'{entry['class']}' is not a layer with arguments")
        args = from_value(entry.get("arguments", []), f"{location}.arguments", self)
        options = {n: from_value(x, f"{location}.{n}", self) for n, x in _table(entry, "options", location).items()}
        return cls(*args, **options)

    def _replace(self, layer: Layer, label: str, child: Layer, location: str) -> None:
        place = next((p for p in places(layer) if p.attribute == label), None)
        if place is None:
            raise malformed(location, f"{layer!r:.60} has no layer '{label}'")
        place.replace_child(child)

    def _apply(self, entry: dict[str, Any], location: str) -> Layer:
        from mithril.graph import Op

        sources = _Operands(self)
        parts = {n: from_value(entry[n], f"{location}.{n}", sources) for n in ("function", "template", "keywords")}
        if not isinstance(parts["function"], (Op, Take)) or not isinstance(parts["template"], list):
            raise malformed(location, "an operation and its operands are expected")
        layer = Apply(parts["function"], parts["template"], parts["keywords"], _text(entry["title"], location))
        if len(layer.sources) != len(sources.connections):
            raise malformed(location, "an operand is missing")
        return layer

    def _block(self, entry: Any, location: str) -> Block:
        model = self.layer(entry["model"], location)
        if not isinstance(model, Model):
            raise malformed(location, "a branch or a loop body is a model")
        block = Block("the block", model)
        block.called, block.has_named_outputs = bool(entry["called"]), bool(entry["named"])
        return block

    def _if(self, entry: dict[str, Any], location: str) -> Layer:
        condition = entry["condition"]
        blocks = [self._block(entry[name], f"{location}.{name}") for name in ("then", "else")]
        layer = If(Connection() if isinstance(condition, dict) else condition, *(b.model for b in blocks))
        layer.then, layer.otherwise = blocks
        return layer

    def _while(self, entry: dict[str, Any], location: str) -> Layer:
        body = self._block(entry["body"], location)
        initial = {
            n: Connection() if isinstance(x, dict) and "source" in x else from_value(x, location, self)
            for n, x in _table(entry, "initial_state", location).items()
        }
        loop_vars, output_vars = (_table(entry, n, location) for n in ("loop_vars", "output_vars"))
        layer = While(entry["condition"], body.model, initial, loop_vars, output_vars, entry.get("max_trips"))
        layer.body = body
        return layer

    def _model(self, entry: dict[str, Any], location: str) -> Layer:
        return _Wiring(entry, location, self).model()


class _Operands(Reading):
    """New connections for the operands of a layer that applies an operation."""

    def __init__(self, reader: _Reader) -> None:
        self.reader = reader
        self.connections: dict[int, Connection] = {}

    def layer(self, number: Any, location: str) -> Layer:
        return self.reader.layer(number, location)

    def class_of(self, name: Any, location: str) -> Any:
        return self.reader.class_of(name, location)

    def source(self, number: Any, location: str) -> Connection:
        if not is_int(number) or not 0 <= number <= len(self.connections):
            raise malformed(location, f"operand {number!r:.40} does not follow {len(self.connections)} operands")
        return self.connections.setdefault(number, Connection())


class _Wiring:
    """A model from its entry."""

    def __init__(self, entry: dict[str, Any], location: str, reader: _Reader) -> None:
        self.entry = entry
        self.location = location
        self.reader = reader
        self.result = Model()
        self.connections = [self._connection(c) for c in entry["connections"]]

    def _connection(self, entry: Any) -> Connection:
        connection = Connection(_text(entry["name"], self.location))
        connection.model = self.result
        if (key := entry.get("key")) is not None:
            location = f"{self.location}.connections"
            values = {n: from_value(x, location, self.reader) for n, x in key.items()}
            connection.key = IOKey(_text(values.pop("name"), location), **values)
        return connection

    def connection(self, number: Any, location: str) -> Connection:
        if not is_int(number) or not 0 <= number < len(self.connections):
            raise malformed(f"{self.location}.{location}", f"there is no connection {number!r:.40}")
        connection: Connection = self.connections[number]
        return connection

    def _names(self, name: str) -> dict[str, Connection]:
        return {n: self.connection(c, name) for n, c in _table(self.entry, name, self.location).items()}

    def model(self) -> Model:
        """Return the model, wired."""
        model, entry = self.result, self.entry
        for k, step in enumerate(entry["steps"]):
            self._add(step, f"steps[{k}]")
        model.connections = self._names("terminals")
        model.inputs_by_name = self._names("inputs")
        for name, connection in model.inputs_by_name.items():
            if connection.step is not None or connection.name != name:
                raise malformed(self.location, f"input '{name}' is not an input")
        if entry.get("outputs") is not None:
            model.chosen_outputs = self._names("outputs")
        if (declared := entry.get("declared_inputs")) is not None:
            model.declared_inputs = tuple(_text(n, self.location) for n in declared)
        model.layer_names = {*(s.name for s in model.steps), *(_text(n, self.location) for n in entry.get("names", []))}
        model.reordered = self._is_reordered()
        inputs = {id(c) for c in model.inputs_by_name.values()}
        used = [*model.connections.values(), *(c for s in model.steps for c in s.sources())]
        for c in [*used, *(model.chosen_outputs or {}).values()]:
            if c.step is None and id(c) not in inputs:
                raise malformed(self.location, f"no layer and no input provides '{c.label}'")
        return model

    def _add(self, entry: Any, location: str) -> None:
        layer = self.reader.layer(entry["layer"], f"{self.location}.{location}")
        step = Step.restored(layer, _text(entry["name"], self.location), self.result, user_location())
        if any(s.name == step.name for s in self.result.steps):
            raise malformed(f"{self.location}.{location}", f"two layers are named '{step.name}'")
        step.bindings = {
            t: Constant(from_value(b["constant"], self.location, self.reader))
            if isinstance(b, dict)
            else self.connection(b, location)
            for t, b in _table(entry, "bindings", location).items()
        }
        for terminal, number in _table(entry, "results", location).items():
            connection = self.connection(number, location)
            if connection.step is not None:
                raise malformed(f"{self.location}.{location}", f"'{connection.label}' has two producers")
            connection.step, connection.terminal = step, terminal
            step.results[terminal] = connection
        self._check(step, layer, f"{self.location}.{location}")
        self.result.steps.append(step)

    def _check(self, step: Step, layer: Layer, location: str) -> None:
        inputs = {*layer.inputs, *layer.optional, *layer.weights}
        for terminal in {*step.bindings} - inputs or {*step.results} - {*layer.outputs, *layer.terminals()}:
            message, _, hint = unknown("terminal", terminal, layer.terminals())
            raise malformed(location, f"{message} of {layer!r:.60}", hint)
        missing = [n for n in layer.inputs if n not in step.bindings] or [
            n for n in layer.outputs if n not in step.results
        ]
        if missing:
            raise malformed(location, f"terminal '{missing[0]}' of {layer!r:.60} is not connected")

    def _is_reordered(self) -> bool:
        done: set[int] = set()
        for step in self.result.steps:
            if any(c.step is not None and c.step.serial not in done for c in step.sources()):
                return True
            done.add(step.serial)
        return False


def _table(entry: Mapping[str, Any], name: str, location: str) -> dict[str, Any]:
    table = entry.get(name, {})
    if not isinstance(table, dict):
        raise malformed(f"{location}.{name}", f"a table is expected, got {type(table).__name__}")
    return table


def _text(value: Any, location: str) -> str:
    if not isinstance(value, str):
        raise malformed(location, f"a text is expected, got {value!r:.40}")
    return value
