"""Steps one and two of compiling: from nested models to an ordered list of layer applications on numbered slots."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mithril.base import DType, ModelError, closest, dtype as as_dtype, fields
from mithril.models.language.connection import NO_DEFAULT, Connection, Constant, IOKey, Step
from mithril.models.language.layer import Layer
from mithril.models.language.model import Model
from mithril.models.language.source_location import Place

TRAINING_FLAG = "is_training"
NO_TAGS: Mapping[str, Any] = {}


@dataclass(frozen=True, slots=True)
class InputDecl:
    """An input of the flat model and what the user declared of it."""

    name: str
    slot: int
    shape: tuple[Any, ...] | None = None  # numbers, names, dims, None for any size
    dtype: DType | None = None
    default: Any = NO_DEFAULT
    where: str = ""  # the layer that reads it first, and the user's line
    alike: str = ""  # a connection of nearly the same name, which a layer produces: the input may be a misspelling

    @property
    def required(self) -> bool:
        return self.default is NO_DEFAULT


@dataclass(frozen=True, slots=True)
class ParamDecl:
    """An input that is a parameter: made by the layer that asks for it first, or from its declared shape."""

    name: str
    key: IOKey


@dataclass(slots=True)
class Leaf:
    """One application of a layer that builds operations."""

    path: str
    layer: Layer
    place: Place
    tags: Mapping[str, Any]
    operands: tuple[int | None, ...]  # slots, in the order of build's parameters
    weights: Mapping[str, int]  # parameters that a slot takes the place of
    results: dict[str, int]  # output terminal -> slot

    def __fingerprint__(self) -> tuple[Any, ...]:
        return fields(self, skip=("place",))


@dataclass(slots=True)
class FlatModel:
    """Everything the tracer needs: leaves in order, and what the slots mean."""

    name: str = "model"
    inference: bool = False
    inputs: tuple[InputDecl, ...] = ()
    outputs: tuple[tuple[str, int], ...] = ()
    leaves: list[Leaf] = field(default_factory=list)
    constants: dict[int, Any] = field(default_factory=dict)
    params: dict[int, ParamDecl] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)  # what the user called a slot
    declared: dict[int, IOKey] = field(default_factory=dict)  # shapes and dtypes to check
    owned: dict[tuple[int, str], int] = field(default_factory=dict)  # a model used twice has one slot per parameter
    slots: int = 0

    def __fingerprint__(self) -> tuple[Any, ...]:
        return fields(self, skip=("owned",))

    def new_slot(self) -> int:
        self.slots += 1
        return self.slots - 1


@dataclass(slots=True)
class _Frame:
    """A model being flattened: where its connections ended up so far."""

    model: Model
    path: str
    tags: Mapping[str, Any]
    slots: dict[int, int]
    steps: Iterator[Step]
    done: Any = None  # called with the frame when the model is finished


def flatten(model: Layer, outputs: Sequence[str] | None = None, inference: bool = False) -> FlatModel:
    """The model's layers in an order that defines before it uses, with every connection resolved.

    ``outputs`` names the values to give; under ``inference`` the input ``is_training`` is the constant False.
    """
    if not isinstance(model, Layer):
        raise _no_model(model)
    model = model if isinstance(model, Model) else _wrapped(model)
    flat = FlatModel(name=_identifier(model), inference=inference)
    top = _Frame(model, "", model.tags or NO_TAGS, {}, iter(ordered(model)))
    _enter_inputs(flat, top, {})
    wanted = model.output_connections(outputs)
    if not wanted:
        raise ModelError("the model has no outputs", hint="add a layer, or model.set_outputs(...)")
    stack = [top]
    while stack:
        frame = stack[-1]
        step = next(frame.steps, None)
        if step is None:
            stack.pop()
            if frame.done is not None:
                frame.done(frame)
        elif isinstance(step.layer, Model):
            if any(f.model is step.layer for f in stack):
                raise ModelError(f"model '{_join(frame.path, step.name)}' contains itself", facts=[f"at {step.place}"])
            stack.append(_enter_model(flat, frame, step))
        else:
            flat.leaves.append(_leaf(flat, frame, step))
    flat.outputs = tuple((name, _slot(flat, top, c)) for name, c in wanted.items())
    flat.inputs = _input_declarations(flat, top)
    return flat


def _no_model(given: object) -> ModelError:
    hint = None
    if isinstance(given, type):
        what = f"the class {given.__name__}"
        hint = f"make one: {given.__name__}(...)" if issubclass(given, Layer) else None
    else:
        what = f"a {type(given).__name__}"
    return ModelError(f"{what} cannot be compiled", facts=["accepted: a model, or a single layer"], hint=hint)


def _wrapped(layer: Layer) -> Model:
    """A model of one layer, whose parameters keep their plain names."""
    model = Model()
    step = Step(layer, (), {t: t for t in layer.outputs}, layer.place)
    model.adopt(step)
    step.name = ""
    model.chosen_outputs = dict(step.results)
    return model


def _identifier(model: Model) -> str:
    return model.name if model.name and model.name.isidentifier() else "model"


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name


# -- order --------------------------------------------------------------------------------------------------------
def ordered(model: Model) -> Sequence[Step]:
    """The steps so that each comes after those it reads from; as they were added wherever that is possible."""
    if not model.reordered:
        return model.steps
    out: list[Step] = []
    state: dict[int, int] = {}  # 1: waiting for its sources, 2: done
    for root in model.steps:
        stack: list[tuple[Step, Iterator[Connection]]] = []
        if root.serial not in state:
            stack.append((root, iter(list(root.sources()))))
            state[root.serial] = 1
        while stack:
            step, sources = stack[-1]
            source = next(sources, None)
            if source is None:
                stack.pop()
                state[step.serial] = 2
                out.append(step)
                continue
            before = source.origin.step
            if before is None or state.get(before.serial) == 2:
                continue
            if state.get(before.serial) == 1:
                raise _cycle([s for s, _ in stack], before)
            state[before.serial] = 1
            stack.append((before, iter(list(before.sources()))))
    return out


def _cycle(stack: list[Step], start: Step) -> ModelError:
    steps = stack[next(k for k, s in enumerate(stack) if s is start) :]
    circle = list(reversed(steps))
    path = " -> ".join(f"'{s.label}'" for s in [*circle, circle[0]])
    return ModelError(
        f"the layers depend on each other in a circle: {path}",
        facts=[f"layer '{s.label}' at {s.place}" for s in circle],
        hint="give one of the outputs another name, or use While for a loop",
    )


# -- entering models ----------------------------------------------------------------------------------------------
def _enter_inputs(flat: FlatModel, frame: _Frame, bound: Mapping[str, int]) -> None:
    """Slots for what a model reads: bound from outside, a parameter of its own, or a default."""
    for name, connection in frame.model.inputs_by_name.items():
        slot = bound.get(name)
        key = connection.key
        if slot is None:
            slot = flat.owned.get((id(frame.model), name))
        if slot is None:
            slot = flat.new_slot()
            full = _join(frame.path, name)
            flat.names[slot] = full
            if key is not None and key.trainable:
                flat.params[slot] = ParamDecl(full, key)
                flat.owned[id(frame.model), name] = slot
            elif frame.path and key is not None and key.default is not NO_DEFAULT:
                flat.constants[slot] = key.default
            elif frame.path:
                raise ModelError(
                    f"input '{name}' of model '{frame.path}' is not connected",
                    hint="it was wired after the model had been added: add the model when it is complete",
                )
        frame.slots[id(connection)] = slot
        _declare(flat, slot, key)


def _enter_model(flat: FlatModel, outer: _Frame, step: Step) -> _Frame:
    assert isinstance(step.layer, Model)
    model = step.layer
    path = _join(outer.path, step.name)
    bound = {terminal: _source(flat, outer, given) for terminal, given in step.bindings.items()}
    frame = _Frame(model, path, _merged(outer.tags, model.tags), {}, iter(ordered(model)))
    _enter_inputs(flat, frame, bound)

    def leave(inner: _Frame) -> None:
        chosen = model.output_connections()
        for terminal, connection in step.results.items():
            source = chosen[terminal] if terminal in chosen else model.terminal(terminal)
            slot = outer.slots[id(connection)] = _slot(flat, inner, source)
            if connection.name:
                flat.names[slot] = connection.name
            _declare(flat, slot, connection.key)

    frame.done = leave
    return frame


def _merged(outer: Mapping[str, Any], own: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**outer, **own} if own and outer else own or outer


def _declare(flat: FlatModel, slot: int, key: IOKey | None) -> None:
    if key is not None and (key.shape_declared is not None or key.dtype_declared is not None):
        flat.declared[slot] = key


def _leaf(flat: FlatModel, frame: _Frame, step: Step) -> Leaf:
    layer = step.layer
    assert isinstance(layer, Layer)
    bindings = step.bindings
    operands: list[int | None] = []
    for terminal in layer.inputs:
        operands.append(_source(flat, frame, bindings[terminal]))
    for terminal in layer.optional:
        given = bindings.get(terminal)
        operands.append(None if given is None else _source(flat, frame, given))
    weights = {t: _source(flat, frame, bindings[t]) for t in layer.weights if t in bindings} if layer.weights else {}
    results = {}
    for terminal, connection in step.results.items():
        slot = results[terminal] = frame.slots[id(connection)] = flat.new_slot()
        if connection.name:
            flat.names[slot] = connection.name
        if connection.key is not None:
            _declare(flat, slot, connection.key)
    tags = _merged(frame.tags, layer.tags)
    return Leaf(_join(frame.path, step.name), layer, step.place, tags, tuple(operands), weights, results)


def _source(flat: FlatModel, frame: _Frame, given: Any) -> int:
    if isinstance(given, Connection):
        return _slot(flat, frame, given)
    assert isinstance(given, Constant)
    slot = flat.new_slot()
    flat.constants[slot] = given.data
    return slot


def _slot(flat: FlatModel, frame: _Frame, connection: Connection) -> int:
    return frame.slots[id(connection.origin)]


def _input_declarations(flat: FlatModel, top: _Frame) -> tuple[InputDecl, ...]:
    readers: dict[int, tuple[Leaf, str]] = {}
    for leaf in reversed(flat.leaves):
        for slot, terminal in zip(leaf.operands, leaf.layer.inputs + leaf.layer.optional, strict=False):
            if slot is not None:
                readers[slot] = (leaf, terminal)
    produced = {flat.names[slot] for leaf in flat.leaves for slot in leaf.results.values() if slot in flat.names}
    found = []
    for name, connection in top.model.inputs_by_name.items():
        slot = top.slots[id(connection)]
        if slot in flat.params:
            continue
        if name == TRAINING_FLAG and flat.inference:
            flat.constants[slot] = False
            continue
        key = connection.key if connection.key is not None else IOKey(name)
        shape, dtype = key.shape_declared, key.dtype_declared
        if dtype is None and slot in readers:  # integers for an embedding, say
            leaf, terminal = readers[slot]
            expected = leaf.layer.expects(terminal)
            dtype = as_dtype(expected[1]) if expected is not None and expected[1] is not None else None
        alike = next(iter(closest(name, sorted(produced), 1)), "")
        found.append(InputDecl(name, slot, shape, dtype, key.default, _where(readers.get(slot)), alike))
    return tuple(found)


def _where(reader: tuple[Leaf, str] | None) -> str:
    if reader is None:
        return ""
    leaf = reader[0]
    parts = [f"layer '{leaf.path}'" if leaf.path else f"{leaf.layer!r}", str(leaf.place)]
    return "read by " + " at ".join(part for part in parts if part)
