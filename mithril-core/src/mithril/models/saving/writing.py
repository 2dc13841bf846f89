"""Models to dictionaries: one entry per layer, with its constructor arguments or, for a model, its wiring."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from mithril.graph import ModelError, __version__
from mithril.models.language.apply_op import Apply
from mithril.models.language.children import within
from mithril.models.language.connection import NO_DEFAULT, Connection, IOKey
from mithril.models.language.control_flow import Block, If, While
from mithril.models.language.layer import Layer
from mithril.models.language.model import Model
from mithril.models.language.surgery import places
from mithril.models.saving.values import Writing, to_value
from mithril.system import UnhashableObject, fingerprint

FORMAT, VERSION = "mithril-model", 1
# Fields of a layer that its arguments, its entry or its place determine.
_RECORDED = {"_children", "_is_replacement", "arguments", "frozen", "location", "name", "pretrained", "tags"}


def to_dict(layer: Layer) -> dict[str, Any]:
    """Return the structure of a layer as JSON values: arguments, connections and names, without parameters."""
    explicit: set[int] = set()  # layers that several parents share: each has an entry of its own
    while True:
        writer = _Writer(explicit)
        root = writer.layer(layer)
        shared = writer.implicit.keys() & writer.numbers.keys() | writer.conflicts
        if not shared - explicit:
            return {
                "format": FORMAT,
                "version": VERSION,
                "mithril": __version__,
                "root": root,
                "layers": writer.entries,
            }
        explicit |= shared


def to_json(layer: Layer, path: str | Path | None = None) -> str:
    """Return ``to_dict`` as text, and write it to the file ``path``."""
    data = to_dict(layer)
    entries = ",\n  ".join(json.dumps(entry) for entry in data.pop("layers"))
    text = f'{json.dumps(data)[:-1]}, "layers": [\n  {entries}\n]}}\n'
    if path is not None:
        Path(path).write_text(text)
    return text


class _Writer(Writing):
    """The entries written so far. A layer follows the layers that its entry refers to."""

    def __init__(self, explicit: set[int]) -> None:
        self.entries: list[dict[str, Any]] = []
        self.numbers: dict[int, int] = {}  # id of a layer -> number of its entry
        self.explicit = explicit
        self.implicit: dict[int, Layer] = {}  # layers that constructors create -> their twins in a new layer
        self.twins: dict[int, Layer] = {}
        self.conflicts: set[int] = set()
        self.open: set[int] = set()
        self.classes: dict[str, type] = {}
        self.alive: list[Any] = []

    def class_name(self, cls: type, location: str) -> str:
        from mithril import plugins

        name, package = cls.__name__, cls.__module__.partition(".")[0]
        library: Any = import_module("mithril.models")
        is_public = name in library.__all__ and getattr(library, name) is cls
        if not is_public and getattr(sys.modules.get(package), name, None) is cls:
            name = f"{package}:{name}"
        elif not is_public and issubclass(cls, Layer) and name in plugins.exports() and plugins.export(name) is cls:
            name = f"mithril:{name}"
        if self.classes.setdefault(name, cls) is not cls:
            raise ModelError(
                f"two classes are named '{name}'",
                facts=[f"{c.__module__}.{c.__qualname__}" for c in (self.classes[name], cls)],
                hint="rename one of them",
            )
        return name

    def layer(self, layer: Layer) -> int:
        number = self.numbers.get(id(layer))
        if number is None:
            if id(layer) in self.open:
                raise ModelError(f"{layer!r} contains itself")
            self.open.add(id(layer))
            entry = self._entry(layer)
            if layer.name is not None:
                entry["name"] = layer.name
            if layer.tags:
                entry["tags"] = dict(layer.tags)
            if layer.frozen:
                entry["frozen"] = list(layer.frozen)
            self.entries.append(entry)
            number = self.numbers[id(layer)] = len(self.entries) - 1
        return number

    def _entry(self, layer: Layer) -> dict[str, Any]:
        location = f"an argument of {layer!r:.60}"
        if isinstance(layer, Model):
            if type(layer).build is not Model.build:
                raise ModelError(f"{layer!r} has a build method of its own", hint="derive its class from Layer")
            return {"class": "Model", **_Wiring(layer, self).record()}
        if isinstance(layer, Apply):
            sources = _Sources(layer, self)
            names = ("function", "template", "keywords")
            values = {name: to_value(getattr(layer, name), location, sources) for name in names}
            return {"class": "Apply", "title": layer.title, **values}
        if isinstance(layer, If):
            condition = {"source": 0} if isinstance(layer.condition, Connection) else layer.condition
            blocks = {"then": self._block(layer.then), "else": self._block(layer.otherwise)}
            return {"class": "If", "condition": condition, **blocks}
        if isinstance(layer, While):
            return {"class": "While", "body": self._block(layer.body), **self._loop(layer, location)}
        args, options = layer.arguments
        entry = {
            "class": self.class_name(type(layer), location),
            "arguments": [to_value(x, location, self) for x in args],
            "options": {name: to_value(x, f"{name}= of {layer!r:.60}", self) for name, x in options.items()},
        }
        if children := self._changed_children(layer, type(layer)(*args, **options)):
            entry["children"] = children
        return entry

    def _block(self, block: Block) -> dict[str, Any]:
        return {"model": self.layer(block.model), "called": block.called, "named": block.has_named_outputs}

    def _loop(self, loop: While, location: str) -> dict[str, Any]:
        initial = {
            n: {"source": 0} if isinstance(x, Connection) else to_value(x, location, self)
            for n, x in loop.initial.items()
        }
        return {
            "condition": loop.condition.text,
            "initial_state": initial,
            "loop_vars": {name: update.text for name, update in loop.updates.items()},
            "output_vars": loop.results,
            "max_trips": loop.max_trips,
        }

    def _changed_children(self, layer: Layer, new: Layer) -> dict[str, int]:
        """Return the numbers of the layers inside that differ from those of a new layer with the same arguments."""
        self.alive.append(new)
        if changes := _changed_fields(layer, new):
            raise ModelError(
                f"{layer!r} was changed after its construction, and a file holds its arguments only",
                facts=[f"changed: {', '.join(changes)}"],
                hint="pass the values to the constructor",
            )
        children, new_children = list(places(layer)), list(places(new))
        if [p.attribute for p in children] != [p.attribute for p in new_children]:
            raise ModelError(
                f"{layer!r} has other layers inside than its arguments create",
                facts=[f"layers: {', '.join(p.attribute for p in children)}",
                       f"created: {', '.join(p.attribute for p in new_children)}"],
            )  # fmt: skip
        return {
            p.attribute: self.layer(p.child)
            for p, q in zip(children, new_children, strict=True)
            if not self._same(p.child, q.child)
        }

    def _same(self, a: Layer, b: Layer) -> bool:
        """Whether the constructor of the layer around ``a`` creates ``a`` again, as ``b``."""
        if a is b:  # an argument, which has an entry
            return True
        if id(a) in self.explicit:
            return False
        if self.implicit.setdefault(id(a), b) is not b:
            self.conflicts.add(id(a))
        if self.twins.setdefault(id(b), a) is not a:
            self.conflicts.add(id(a))
        if (
            type(a) is not type(b)
            or a.name != b.name
            or (a.tags, a.frozen) != (b.tags, b.frozen)
            or _changed_fields(a, b)
        ):
            return self._differs(a)
        inner, new = list(places(a)), list(places(b))
        if [p.attribute for p in inner] != [p.attribute for p in new] or not all(
            self._same(p.child, q.child) for p, q in zip(inner, new, strict=True)
        ):
            return self._differs(a)
        if isinstance(a, Model) and isinstance(b, Model):
            blank = _Blank()
            if _Wiring(a, blank).record() != _Wiring(b, blank).record():
                return self._differs(a)
        return True

    def _differs(self, a: Layer) -> bool:
        self.explicit.add(id(a))
        self.implicit.pop(id(a), None)
        return False


def _changed_fields(layer: Layer, new: Layer) -> list[str]:
    """Return the names of fields, other than layers, that differ from those of a new layer."""
    if isinstance(layer, (Model, Apply, If, While)):
        return []
    fields, new_fields = vars(layer), vars(new)
    names = [n for n in {**fields, **new_fields} if n not in _RECORDED]
    return [n for n in names if n not in fields or n not in new_fields or _mark(fields[n]) != _mark(new_fields[n])]


def _mark(value: Any) -> str:
    if any(within(value, Layer)):
        return "layers"  # compared by place
    try:
        return fingerprint(value)
    except UnhashableObject:
        return type(value).__name__


class _Blank(Writing):
    """No references: for the comparison of two models whose layers are compared already."""

    def layer(self, layer: Layer) -> int:
        return 0


class _Sources(Writing):
    """References to the operands of a layer that applies an operation."""

    def __init__(self, layer: Apply, writer: _Writer) -> None:
        self.numbers = {id(c): k for k, c in enumerate(layer.sources)}
        self.writer = writer

    def layer(self, layer: Layer) -> int:
        return self.writer.layer(layer)

    def class_name(self, cls: type, location: str) -> str:
        return self.writer.class_name(cls, location)

    def source(self, connection: Connection, location: str) -> int:
        return self.numbers[id(connection)]


class _Wiring:
    """The wiring of a model: numbered connections, and the steps that produce and use them."""

    def __init__(self, model: Model, writing: Writing) -> None:
        self.model = model
        self.writing = writing
        self.numbers: dict[int, int] = {}
        self.connections: list[dict[str, Any]] = []

    def connection(self, connection: Connection) -> int:
        origin = connection.origin
        number = self.numbers.get(id(origin))
        if number is None:
            number = self.numbers[id(origin)] = len(self.connections)
            entry: dict[str, Any] = {"name": origin.name}
            key = origin if isinstance(origin, IOKey) else origin.key
            if key is not None:
                entry["key"] = self._key(key)
            self.connections.append(entry)
        return number

    def _key(self, key: IOKey) -> dict[str, Any]:
        location = f"the declaration of '{key.name}'"
        values = {
            "shape": key.shape_declared,
            "dtype": key.dtype_declared,
            "trainable": key.trainable or None,
            "expose": key.expose or None,
            "init": key.init or None,
            "sparse": key.sparse,
        }
        entry = {n: to_value(x, location, self.writing) for n, x in values.items() if x is not None}
        if key.default is not NO_DEFAULT:
            entry["default"] = to_value(key.default, location, self.writing)
        return {"name": key.name, **entry}

    def _names(self, connections: Mapping[str, Connection]) -> dict[str, int]:
        return {name: self.connection(c) for name, c in connections.items()}

    def record(self) -> dict[str, Any]:
        """Return the entry of the model."""
        model = self.model
        inputs = self._names(model.inputs_by_name)
        steps = [self._step(step) for step in model.steps]
        outputs = model.chosen_outputs
        return {
            "inputs": inputs,
            "steps": steps,
            "terminals": self._names(model.connections),
            "outputs": None if outputs is None else self._names(outputs),
            "declared_inputs": None if model.declared_inputs is None else list(model.declared_inputs),
            "names": sorted(model.layer_names - {step.name for step in model.steps}),
            "connections": self.connections,
        }

    def _step(self, step: Any) -> dict[str, Any]:
        location = f"an input of '{step.label}'"
        bindings = {
            t: self.connection(b)
            if isinstance(b, Connection)
            else {"constant": to_value(b.data, location, self.writing)}
            for t, b in step.bindings.items()
        }
        number = self.writing.layer(step.layer)
        return {"layer": number, "name": step.name, "bindings": bindings, "results": self._names(step.results)}
