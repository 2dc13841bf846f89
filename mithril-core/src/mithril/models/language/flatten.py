"""Flattening, the first step of compilation: from nested models to an ordered list of layer calls on slots."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import isfunction
from typing import Any

from mithril import plugins
from mithril.graph import DType, ModelError, closest, dtype as as_dtype
from mithril.models.language.connection import NO_DEFAULT, Connection, Constant, IOKey, Step
from mithril.models.language.layer import TRAINING_FLAG, Layer
from mithril.models.language.model import Model
from mithril.models.language.source_location import SourceLocation
from mithril.system import fields

NO_TAGS: Mapping[str, Any] = {}


@dataclass(frozen=True, slots=True)
class InputDecl:
    """An input of the flat model with its declared shape and dtype."""

    name: str
    slot: int
    shape: tuple[Any, ...] | None = None  # ints, names, dims, None for any size
    dtype: DType | None = None
    default: Any = NO_DEFAULT
    where: str = ""  # the first layer that uses the input, and the user's line
    # Names that layers produce: the input may be one of them, misspelled. The order of a set differs between processes.
    produced: frozenset[str] = field(default=frozenset(), repr=False, compare=False)
    sparse: str | None = None  # the format of sparse arrays that calls pass

    def __fingerprint__(self) -> tuple[Any, ...]:
        return fields(self, skip=("where", "produced"))  # for messages only

    @property
    def required(self) -> bool:
        return self.default is NO_DEFAULT

    @property
    def misspelling(self) -> str | None:
        """The hint that the input may be a misspelled connection, or None without a similar name."""
        # Searched for messages only: among a thousand names it takes 10 ms.
        similar = closest(self.name, sorted(self.produced), 1)
        return f"no layer produces '{self.name}'; did you mean '{similar[0]}'?" if similar else None


@dataclass(frozen=True, slots=True)
class ParamDecl:
    """An input that is a parameter, created by the first layer that uses it or from its declared shape."""

    name: str
    key: IOKey


@dataclass(slots=True)
class LayerCall:
    """One application of a layer that is not a model."""

    path: str
    layer: Layer
    location: SourceLocation
    tags: Mapping[str, Any]
    operands: tuple[int | None, ...]  # slots, in the order of the parameters of ``build``
    weights: Mapping[str, int]  # slots that replace parameters of the layer
    results: dict[str, int]  # output terminal -> slot
    needed: bool = True  # whether an output depends on it

    def __fingerprint__(self) -> tuple[Any, ...]:
        return fields(self, skip=("location",))


@dataclass(slots=True)
class FlatModel:
    """The input of the tracer: layer calls in order, and the contents of their slots.

    Calls and inputs that no output depends on are kept for their names only.
    """

    name: str = "model"
    inference: bool = False
    inputs: tuple[InputDecl, ...] = ()
    unused_inputs: tuple[str, ...] = ()
    unused_params: tuple[str, ...] = ()
    outputs: tuple[tuple[str, int], ...] = ()
    layer_calls: list[LayerCall] = field(default_factory=list)
    constants: dict[int, Any] = field(default_factory=dict)
    params: dict[int, ParamDecl] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)  # the user's name of a slot
    declared: dict[int, IOKey] = field(default_factory=dict)  # shapes and dtypes to check
    owned: dict[tuple[int, str], int] = field(default_factory=dict)  # a model used twice has one slot per parameter
    pretrained: dict[str, Any] = field(default_factory=dict)  # arrays of parameters and states by full name
    frozen: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)  # path of a model, patterns of parameters
    learned: Mapping[str, Any] = field(default_factory=dict)  # shapes of parameters that a call or a file has
    watched: dict[str, int] = field(default_factory=dict)  # path of a layer inside another one -> slot of its result
    slots: int = 0

    def __fingerprint__(self) -> tuple[Any, ...]:
        return fields(self, skip=("owned", "pretrained"))

    def adopt(self, path: str, model: Layer) -> None:
        """Add the pretrained arrays of a model, unless a model around it has them, and its frozen parameters."""
        if model.frozen:
            self.frozen.append((path, model.frozen))
        for name, array in model.pretrained.items():
            self.pretrained.setdefault(_join(path, name), array)

    def new_slot(self) -> int:
        self.slots += 1
        return self.slots - 1


@dataclass(slots=True)
class _Frame:
    """A model being flattened, with the slots assigned to its connections so far."""

    model: Model
    path: str
    tags: Mapping[str, Any]
    slots: dict[int, int]
    steps: Iterator[Step]
    done: Any = None  # callback, called with the frame when all steps are flattened


def flatten(model: Layer, outputs: Sequence[str] | None = None, inference: bool = False) -> FlatModel:
    """Flatten a model into layer calls in topological order, with every connection resolved to a slot.

    ``outputs`` selects the outputs by name, or inner values by path: of a connection in a nested model
    ("block.hidden"), or of a layer ("block.linear", the path of ``walk``). With ``inference`` the input ``is_training``
    is the constant False.
    """
    if not isinstance(model, Layer):
        raise _not_a_model(model)
    model = model if isinstance(model, Model) else _as_model(model)
    flat = FlatModel(name=_identifier(model), inference=inference)
    top = _Frame(model, "", model.tags or NO_TAGS, {}, iter(topological_order(model)))
    flat.adopt("", model)
    _enter_inputs(flat, top, {})
    terminals, inner = _split_outputs(model, outputs)
    outputs_by_name = model.output_connections(terminals)
    if not outputs_by_name and not inner:
        raise ModelError("the model has no outputs", hint="add a layer, or model.set_outputs(...)")
    stack = [top]
    while stack:
        frame = stack[-1]
        step = next(frame.steps, None)
        if step is None:
            stack.pop()
            for name in inner:
                if (slot := _inner_slot(frame, name)) is not None:
                    inner[name] = slot
            if frame.done is not None:
                frame.done(frame)
        elif isinstance(step.layer, Model):
            if any(f.model is step.layer for f in stack):
                raise ModelError(
                    f"model '{_join(frame.path, step.name)}' contains itself", facts=[f"at {step.location}"]
                )
            stack.append(_enter_model(flat, frame, step))
        else:
            flat.layer_calls.append(_layer_call(flat, frame, step))
    slots = {name: _slot(flat, top, c) for name, c in outputs_by_name.items()}
    for name, slot in inner.items():
        slots[name] = flat.watched[name] = flat.new_slot() if slot is None else slot
        if slot is not None:
            del flat.watched[name]
    flat.outputs = tuple((name, slots[name]) for name in outputs or slots)
    needed = _mark_needed(flat)
    unused = {slot: name for name, c in top.model.inputs_by_name.items() if (slot := top.slots[id(c)]) not in needed}
    flat.unused_inputs = tuple(name for slot, name in unused.items() if slot not in flat.params)
    flat.unused_params = tuple(param.name for slot, param in flat.params.items() if slot not in needed)
    flat.inputs = _input_declarations(flat, top)
    return flat


def _mark_needed(flat: FlatModel) -> set[int]:
    """Mark the layer calls that no output depends on, and return the slots that the other ones and the outputs need."""
    needed = {slot for _, slot in flat.outputs}
    for call in reversed(flat.layer_calls):
        is_watched = any(not call.path or f"{name}.".startswith(f"{call.path}.") for name in flat.watched)
        call.needed = is_watched or not needed.isdisjoint(call.results.values())
        if call.needed:
            needed.update(call.weights.values(), (slot for slot in call.operands if slot is not None))
    return needed


def _split_outputs(model: Model, outputs: Sequence[str] | None) -> tuple[Sequence[str] | None, dict[str, int | None]]:
    """Return the outputs of the model itself, and those that are values inside it, without a slot yet."""
    if outputs is None:
        return None, {}
    names = {*model.connections, *model.output_connections()}
    missing = [name for name in outputs if isinstance(name, str) and name not in names]
    if not missing:
        return outputs, {}
    layers = dict(model.walk())
    inner: dict[str, int | None] = {}
    for name in missing:
        path, _, last = name.rpartition(".")
        block = layers.get(path)
        if name in layers or (isinstance(block, Layer) and last in block.terminals()):
            inner[name] = None
    return [name for name in outputs if name not in inner], inner


def _inner_slot(frame: _Frame, name: str) -> int | None:
    """Return the slot of a value of this model by its path, or None if the path leads elsewhere."""
    if frame.path and not name.startswith(f"{frame.path}."):
        return None
    rest = name[len(frame.path) + 1 :] if frame.path else name
    connection = frame.model.connections.get(rest) if frame.path else None
    if connection is None:
        label, _, terminal = rest.partition(".")
        step = next((s for s in frame.model.steps if s.name == label), None)
        if step is None or not step.results:
            return None
        connection = step.results.get(terminal) if terminal else next(iter(step.results.values()))
    return None if connection is None else frame.slots.get(id(connection.origin))


def _not_a_model(model: object) -> ModelError:
    hint = None
    if isinstance(model, type):
        description = f"the class {model.__name__}"
        hint = f"create an instance: {model.__name__}(...)" if issubclass(model, Layer) else None
    else:
        description = f"a {type(model).__name__}"
        importers = [f"from_{kind.__module__.partition('.')[0]}" for kind in type(model).__mro__]
        importer = next((name for name in importers if name in plugins.pip_hints.EXPORTS), None)
        hint = f"ml.{importer} imports models of this package" if importer else None
        if isfunction(model):
            hint = "call it in the build method of a layer: class Network(Layer): def build(self, x): ..."
    return ModelError(f"{description} cannot be compiled", facts=["accepted: a model, or a single layer"], hint=hint)


def _as_model(layer: Layer) -> Model:
    """Return a model of one layer, with its optional inputs, whose parameter names have no prefix."""
    model = Model()
    optional = {t: IOKey(t, default=None) for t in layer.optional}
    step = Step(layer, (), {**optional, **{t: t for t in layer.outputs}}, layer.location)
    model.attach(step)
    model.pretrained = layer.pretrained
    # Parameters of a single layer then have the names of its documentation, "weight" and not
    # "linear.weight".
    step.name = ""
    model.chosen_outputs = dict(step.results)
    return model


def _identifier(model: Model) -> str:
    return model.name if model.name and model.name.isidentifier() else "model"


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name


# -- order --------------------------------------------------------------------------------------------------------
def topological_order(model: Model) -> Sequence[Step]:
    """Return the steps in topological order, and in the order in which they were added where possible."""
    if not model.reordered:
        return model.steps
    out: list[Step] = []
    state: dict[int, int] = {}  # step -> 1: on the stack, 2: done
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
    cycle = list(reversed(steps))
    path = " -> ".join(f"'{s.label}'" for s in [*cycle, cycle[0]])
    return ModelError(
        f"cyclic dependency between layers: {path}",
        facts=[f"layer '{s.label}' at {s.location}" for s in cycle],
        hint="rename one of the outputs, or use While for a loop",
    )


# -- entering models ----------------------------------------------------------------------------------------------
def _enter_inputs(flat: FlatModel, frame: _Frame, bound: Mapping[str, int]) -> None:
    """Assign slots to the inputs of a model: bound by the enclosing model, a parameter, or a default."""
    for name, connection in frame.model.inputs_by_name.items():
        slot = bound.get(name)
        key = connection.key
        if slot is None:
            # A model that is used twice shares its parameters: the first use has made the slot.
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
                    hint="it was wired after the model was added: add the model once it is complete",
                )
        frame.slots[id(connection)] = slot
        _declare(flat, slot, key)


def _enter_model(flat: FlatModel, outer: _Frame, step: Step) -> _Frame:
    assert isinstance(step.layer, Model)
    model = step.layer
    path = _join(outer.path, step.name)
    flat.adopt(path, model)
    bound = {terminal: _source(flat, outer, binding) for terminal, binding in step.bindings.items()}
    frame = _Frame(model, path, _merged(outer.tags, model.tags), {}, iter(topological_order(model)))
    _enter_inputs(flat, frame, bound)

    def leave(inner: _Frame) -> None:
        outputs = model.output_connections()
        for terminal, connection in step.results.items():
            source = outputs[terminal] if terminal in outputs else model.terminal(terminal)
            slot = outer.slots[id(connection)] = _slot(flat, inner, source)
            if connection.name:
                flat.names[slot] = connection.name
            _declare(flat, slot, connection.key)

    frame.done = leave
    return frame


def _merged(outer: Mapping[str, Any], inner: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**outer, **inner} if inner and outer else inner or outer


def _declare(flat: FlatModel, slot: int, key: IOKey | None) -> None:
    if key is not None and (key.shape_declared is not None or key.dtype_declared is not None):
        flat.declared[slot] = key


def _layer_call(flat: FlatModel, frame: _Frame, step: Step) -> LayerCall:
    layer = step.layer
    assert isinstance(layer, Layer)
    bindings = step.bindings
    operands: list[int | None] = []
    for terminal in layer.inputs:
        operands.append(_source(flat, frame, bindings[terminal]))
    for terminal in layer.optional:
        binding = bindings.get(terminal)
        operands.append(None if binding is None else _source(flat, frame, binding))
    weights = {t: _source(flat, frame, bindings[t]) for t in layer.weights if t in bindings} if layer.weights else {}
    results = {}
    for terminal, connection in step.results.items():
        slot = results[terminal] = frame.slots[id(connection)] = flat.new_slot()
        if connection.name:
            flat.names[slot] = connection.name
        if connection.key is not None:
            _declare(flat, slot, connection.key)
    path, tags = _join(frame.path, step.name), _merged(frame.tags, layer.tags)
    return LayerCall(path, layer, step.location, tags, tuple(operands), weights, results)


def _source(flat: FlatModel, frame: _Frame, source: Any) -> int:
    if isinstance(source, Connection):
        return _slot(flat, frame, source)
    assert isinstance(source, Constant)
    slot = flat.new_slot()
    flat.constants[slot] = source.data
    return slot


def _slot(flat: FlatModel, frame: _Frame, connection: Connection) -> int:
    return frame.slots[id(connection.origin)]


def _input_declarations(flat: FlatModel, top: _Frame) -> tuple[InputDecl, ...]:
    readers: dict[int, tuple[LayerCall, str]] = {}
    for call in reversed(flat.layer_calls):
        for slot, terminal in zip(call.operands, call.layer.inputs + call.layer.optional, strict=False):
            if slot is not None and call.needed:
                readers[slot] = (call, terminal)
    results = (slot for call in flat.layer_calls for slot in call.results.values())
    produced = frozenset(flat.names[slot] for slot in results if slot in flat.names)
    declarations = []
    for name, connection in top.model.inputs_by_name.items():
        slot = top.slots[id(connection)]
        if slot in flat.params or name in flat.unused_inputs:
            continue
        if name == TRAINING_FLAG and flat.inference:
            flat.constants[slot] = False
            continue
        key = connection.key if connection.key is not None else IOKey(name)
        shape, dtype = key.shape_declared, key.dtype_declared
        if dtype is None and slot in flat.declared:  # by the model inside that reads it
            dtype = flat.declared[slot].dtype_declared
        if dtype is None and slot in readers:  # for example integers for an embedding
            call, terminal = readers[slot]
            expected = call.layer.expects(terminal)
            dtype = as_dtype(expected[1]) if expected is not None and expected[1] is not None else None
        reader = _where(readers.get(slot))
        declarations.append(InputDecl(name, slot, shape, dtype, key.default, reader, produced, key.sparse))
    return tuple(declarations)


def _where(reader: tuple[LayerCall, str] | None) -> str:
    if reader is None:
        return ""
    call = reader[0]
    parts = [f"layer '{call.path}'" if call.path else f"{call.layer!r}", str(call.location)]
    return "read by " + " at ".join(part for part in parts if part)
