"""Steps three and four of compiling: layers run on typed values, which gives the graph with all shapes and dtypes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from mithril.base import Dim, DType, DTypeError, ModelError, ShapeError, TensorType, assume, closest, matches
from mithril.ir import Builder, Graph, Value, as_results
from mithril.models.language.connection import NO_DEFAULT, IOKey
from mithril.models.language.flatten import TRAINING_FLAG, FlatModel, Leaf, flatten
from mithril.models.language.model import Model
from mithril.models.language.trace_context import Context, LazyParam


def trace_model(
    flat: FlatModel,
    types: Mapping[str, TensorType],
    *,
    training: bool = False,
    constants: Mapping[str, Any] | None = None,
    trainable: Collection[str] = (),
    dtype: DType | None = None,
) -> Graph:
    """The graph of a flat model for inputs of these types.

    Inputs in ``constants`` are fixed to their values (a bool or number there decides ``If`` now). With ``trainable``,
    only what matches these names or patterns is: inputs that match are marked ``trainable=True``, parameters that do
    not ``trainable=False``. ``dtype`` is that of parameters which no input decides.
    """
    builder = Builder(flat.name)
    constants = constants or {}
    _check_names("constant", constants, flat)
    context = Context(builder, training=training and not flat.inference, dtype=dtype, frozen=_Frozen(trainable))
    with builder, context.active():
        slots: list[Any] = [None] * flat.slots
        for decl in flat.inputs:
            slots[decl.slot] = _input(builder, decl, types, constants, trainable)
        outputs = run_flat(context, flat, slots)
        named = {name: context.as_value(value) for name, value in outputs.items()}
        carried = context.finish()
        clash = next((r.name for r in carried if r.name in named), None)
        if clash is not None:
            raise ModelError(f"an output cannot be named '{clash}'", hint="that is the name of the model's state")
    return builder.build((*as_results(named), *carried))


class _Frozen(dict[str, bool]):
    """Which parameters a choice of trainable names leaves out."""

    def __init__(self, trainable: Collection[str]) -> None:
        super().__init__()
        self.patterns = tuple(trainable)

    def get(self, name: str, default: Any = False) -> bool:
        return bool(self.patterns) and not _matches(name, self.patterns)


def _matches(name: str, patterns: Collection[str]) -> bool:
    return any(matches(name, p) for p in patterns)


def _check_names(kind: str, given: Mapping[str, Any], flat: FlatModel) -> None:
    known = [d.name for d in flat.inputs]
    for name in given:
        if flat.inference and name == TRAINING_FLAG:
            if given[name]:
                raise ModelError(f"{name}=True contradicts inference=True", hint="leave one of them out")
        elif name not in known:
            near = closest(name, known, 1)
            raise ModelError(
                f"the {kind} '{name}' is no input of the model",
                facts=[f"inputs: {', '.join(known)}"],
                hint=f"did you mean '{near[0]}'?" if near else None,
            )


def _input(
    builder: Builder,
    decl: Any,
    types: Mapping[str, TensorType],
    constants: Mapping[str, Any],
    trainable: Collection[str],
) -> Any:
    name = decl.name
    given = constants.get(name, NO_DEFAULT if name in types else decl.default)
    if given is not NO_DEFAULT:
        if isinstance(given, (bool, int, float)):
            return given
        if isinstance(given, np.ndarray) and given.shape == () and given.dtype == np.bool_:
            return bool(given)
        return builder.constant(given, name=name)
    if name not in types:
        raise ShapeError(
            f"Cannot infer shape for tensor '{name}'",
            facts=[decl.where],
            hint=f"no layer produces '{name}'; did you mean '{decl.alike}'?"
            if decl.alike
            else f"give it: shapes={{'{name}': [...]}}",
        )
    t = types[name]
    tags = {"trainable": True} if trainable and _matches(name, trainable) else None
    return builder.input(name, t.shape, t.dtype, tags=tags)


def run_flat(
    context: Context, flat: FlatModel, slots: list[Any], path: str = "", home: str | None = None
) -> dict[str, Any]:
    """Run every leaf; ``slots`` holds the inputs and receives the rest. Gives the outputs by name.

    ``path`` is where the model stands, ``home`` where its parameters do, if it is used more than once.
    """
    home = path if home is None else home
    for slot, data in flat.constants.items():
        slots[slot] = data
    for slot, param in flat.params.items():
        if slots[slot] is None:
            slots[slot] = LazyParam(f"{home}.{param.name}" if home else param.name, param.key)
    sizes: dict[str, Any] = {}
    declared = flat.declared
    for slot, key in declared.items():
        if slots[slot] is not None:
            check_declared(flat.names.get(slot, ""), slots[slot], key, sizes)
    for leaf in flat.leaves:
        results = run_leaf(context, leaf, slots, path)
        for slot, value in zip(leaf.results.values(), results, strict=True):
            slots[slot] = value
            name = flat.names.get(slot)
            if name is not None and isinstance(value, Value):
                _rename(value, name)
            if slot in declared:
                check_declared(name or "", value, declared[slot], sizes)
    return {name: slots[slot] for name, slot in flat.outputs}


def run_model(model: Model, context: Context, values: Sequence[Any]) -> tuple[Any, ...]:
    """Run a model that is used as a layer inside another layer's build."""
    flat = flatten(model)
    slots: list[Any] = [None] * flat.slots
    inputs = dict(zip(model.inputs + model.optional, values, strict=True))
    for decl in flat.inputs:
        value = inputs.get(decl.name)
        slots[decl.slot] = decl.default if value is None else value
    for slot, param in flat.params.items():
        slots[slot] = context.bound.get(param.name)
    return tuple(run_flat(context, flat, slots, context.path, context.home).values())


def run_leaf(context: Context, leaf: Leaf, slots: list[Any], path: str) -> tuple[Any, ...]:
    """The results of one leaf, as many as it has outputs."""
    layer = leaf.layer
    operands = tuple(None if s is None else slots[s] for s in leaf.operands)
    if not layer.scalars:
        operands = tuple(context.as_value(o) for o in operands)
    else:
        operands = tuple(context.settle(o) if isinstance(o, LazyParam) else o for o in operands)
    bound = {name: slots[s] for name, s in leaf.weights.items()} if leaf.weights else leaf.weights
    full = f"{path}.{leaf.path}" if path and leaf.path else path or leaf.path
    made = context.run(layer, full, leaf.place, leaf.tags, operands, bound)
    results = tuple(made) if isinstance(made, (tuple, list)) else (made,)
    if len(results) != len(leaf.results):
        raise ModelError(
            f"{layer!r} gave {len(results)} results, but has the outputs {', '.join(leaf.results)}",
            facts=[f"layer '{full}' at {leaf.place}"],
        )
    return results


def _rename(value: Value, name: str) -> None:
    """Call the newest value what the user calls it; a value made earlier keeps the name it has."""
    builder = Builder.current()
    if builder.nodes and any(value is r for r in builder.nodes[-1].results):
        value.name = builder.unique(name)


def check_declared(name: str, given: Any, key: IOKey, sizes: dict[str, Any]) -> None:
    """A value against what an IOKey says of it; names of sizes mean the same everywhere in a model."""
    if not isinstance(given, Value):
        return
    shape, where = key.shape_declared, f"declared at {key.made}"
    if key.dtype_declared is not None and given.dtype is not key.dtype_declared:
        raise DTypeError(
            f"Type mismatch: expected {key.dtype_declared}, got {given.dtype}",
            facts=[f"terminal '{name}', {where}"],
            hint="insert a Cast layer, or give the input that dtype with types=",
        )
    if shape is None:
        return
    fits = len(shape) == len(given.shape)
    if fits:
        for size, actual in zip(shape, given.shape, strict=True):
            if isinstance(size, str):
                size = sizes.setdefault(size, actual)
            if isinstance(size, (int, Dim)) and not assume(size, "==", actual, f"the declared shape of '{name}'"):
                fits = False
    if not fits:
        expected = ", ".join("any" if s is None else str(s) for s in shape)
        raise ShapeError(
            f"'{name}' has the shape [{', '.join(map(str, given.shape))}], declared as [{expected}]", facts=[where]
        )


Model._run = staticmethod(run_model)
