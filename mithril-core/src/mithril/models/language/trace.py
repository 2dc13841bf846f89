"""Tracing: running the layers on typed values, which yields a graph with all shapes and dtypes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from mithril.backend import covers
from mithril.compiler import declared_text, expanded
from mithril.graph import (
    Builder,
    Dim,
    DType,
    DTypeError,
    Graph,
    ModelError,
    ShapeError,
    TensorType,
    Value,
    as_results,
    assume,
    closest,
)
from mithril.models.language.connection import NO_DEFAULT, IOKey
from mithril.models.language.flatten import FlatModel, LayerCall, flatten
from mithril.models.language.layer import TRAINING_FLAG
from mithril.models.language.model import Model
from mithril.models.language.trace_context import Context, LazyParam, join_path


def trace_model(
    flat: FlatModel,
    types: Mapping[str, TensorType],
    *,
    training: bool = False,
    constants: Mapping[str, Any] | None = None,
    trainable: Collection[str] = (),
    dtype: DType | None = None,
    results: dict[str, Any] | None = None,
) -> Graph:
    """Return the graph of a flat model for inputs of these types; ``results`` receives that of each layer by path.

    Inputs in ``constants`` are fixed to their values; a bool or number also resolves the conditions that use it. If
    ``trainable`` contains names or patterns, inputs that match are tagged ``trainable=True``, and parameters that do
    not match ``trainable=False``. ``dtype`` applies to parameters whose dtype does not follow from an input.
    """
    builder = Builder(flat.name)
    constants = constants or {}
    _check_names("constant", constants, flat)
    context = Context(builder, training=training and not flat.inference, dtype=dtype, frozen=_Frozen(trainable))
    context.pretrained, context.learned = flat.pretrained, flat.learned  # layers within layers add their arrays
    with builder, context.active():
        slots: list[Any] = [None] * flat.slots
        for decl in flat.inputs:
            slots[decl.slot] = _input(builder, decl, types, constants, trainable)
        outputs = run_flat(context, flat, slots)
        outputs_by_name = {name: context.as_value(value) for name, value in outputs.items()}
        carried = context.finish()
        clash = next((r.name for r in carried if r.name in outputs_by_name), None)
        if clash is not None:
            raise ModelError(
                f"an output cannot be named '{clash}'", hint="rename it: a state of the model has this name"
            )
    if results is not None:
        results.update(context.results)
    return builder.build((*as_results(outputs_by_name), *carried))


class _Frozen(dict[str, bool]):
    """Mapping from parameter names to whether the trainable patterns exclude the parameter."""

    def __init__(self, trainable: Collection[str]) -> None:
        super().__init__()
        self.patterns = tuple(trainable)

    def get(self, name: str, default: Any = False) -> bool:
        return bool(self.patterns) and not _matches(name, self.patterns)


def _matches(name: str, patterns: Collection[str]) -> bool:
    return any(covers(p, name) for p in patterns)


def _check_names(kind: str, values: Mapping[str, Any], flat: FlatModel) -> None:
    names = [*(d.name for d in flat.inputs), *flat.unused_inputs]
    for name in values:
        if flat.inference and name == TRAINING_FLAG:
            if values[name]:
                raise ModelError(f"{name}=True conflicts with inference=True", hint="remove one of them")
        elif name not in names:
            suggestions = closest(name, names, 1)
            raise ModelError(
                f"the {kind} '{name}' is not an input of the model",
                facts=[f"inputs: {', '.join(names)}"],
                hint=f"did you mean '{suggestions[0]}'?" if suggestions else None,
            )


def _input(
    builder: Builder,
    decl: Any,
    types: Mapping[str, TensorType],
    constants: Mapping[str, Any],
    trainable: Collection[str],
) -> Any:
    name = decl.name
    constant = constants.get(name, NO_DEFAULT if name in types else decl.default)
    if constant is not NO_DEFAULT:
        if constant is None or isinstance(constant, (bool, int, float)):
            return constant
        if isinstance(constant, np.ndarray) and constant.shape == () and constant.dtype == np.bool_:
            return bool(constant)
        return builder.constant(constant, name=name)
    if name not in types:
        raise ShapeError(
            f"Cannot infer shape for tensor '{name}'",
            facts=[decl.where],
            hint=decl.misspelling or f"pass shapes={{'{name}': [...]}}",
        )
    t = types[name]
    tags = {"trainable": True} if trainable and _matches(name, trainable) else None
    return builder.input(name, t.shape, t.dtype, tags=tags)


def run_flat(
    context: Context, flat: FlatModel, slots: list[Any], path: str = "", scope: str | None = None
) -> dict[str, Any]:
    """Run all layer calls and return the outputs by name; ``slots`` holds the inputs and receives all results.

    ``path`` is the path of the model. ``scope`` is the prefix of its parameters, if the model is used more than once.
    """
    scope = path if scope is None else scope
    for slot, data in flat.constants.items():
        slots[slot] = data
    for slot, param in flat.params.items():
        if slots[slot] is None:
            slots[slot] = LazyParam(f"{scope}.{param.name}" if scope else param.name, param.key)
    context.watched.update(dict.fromkeys(flat.watched))
    if flat.pretrained is not context.pretrained:
        context.adopt(scope, flat.pretrained)
    for model, patterns in flat.frozen:
        context.freeze(join_path(scope, model), patterns)
    sizes: dict[str, Any] = {}
    declared = flat.declared
    for slot, key in declared.items():
        if slots[slot] is not None:
            check_declared(flat.names.get(slot, ""), slots[slot], key, sizes)
    for call in flat.layer_calls:
        if not call.needed:
            context.pass_over(call.layer, join_path(path, call.path))
            continue
        results = run_layer_call(context, call, slots, path)
        for slot, value in zip(call.results.values(), results, strict=True):
            slots[slot] = value
            name = flat.names.get(slot)
            if name is not None and isinstance(value, Value):
                _rename(value, name)
            if slot in declared:
                check_declared(name or "", value, declared[slot], sizes)
    for name, slot in flat.watched.items():
        slots[slot] = context.watched[name]
        if slots[slot] is None:
            raise ModelError(f"no result of layer '{name}': the model does not run it", hint="walk() lists the layers")
    return {name: slots[slot] for name, slot in flat.outputs}


@contextmanager
def weights_of(call: LayerCall, flat: FlatModel) -> Iterator[None]:
    """Within this context the layer of the call finds its pretrained arrays, without being traced."""
    context = Context(Builder(flat.name), training=False, dtype=None, frozen={})
    context.pretrained = {**{join_path(call.path, n): x for n, x in call.layer.pretrained.items()}, **flat.pretrained}
    context.learned, context.parameter_scopes[call.layer] = flat.learned, call.path
    with context.active():
        yield


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
    return tuple(run_flat(context, flat, slots, context.path, context.parameter_scope).values())


def run_layer_call(context: Context, call: LayerCall, slots: list[Any], path: str) -> tuple[Any, ...]:
    """Run one layer call and return its results, one for each output."""
    layer = call.layer
    operands = tuple(None if s is None else slots[s] for s in call.operands)
    if not layer.scalars:
        operands = tuple(context.as_value(o) for o in operands)
    else:
        operands = tuple(context.materialize(o) if isinstance(o, LazyParam) else o for o in operands)
    bound = {name: slots[s] for name, s in call.weights.items()} if call.weights else call.weights
    full = f"{path}.{call.path}" if path and call.path else path or call.path
    built = context.run(layer, full, call.location, call.tags, operands, bound)
    if isinstance(built, Mapping) and set(built) == set(call.results):
        built = [built[name] for name in call.results]
    results = tuple(built) if isinstance(built, (tuple, list, Mapping)) else (built,)
    if len(results) != len(call.results) or isinstance(built, Mapping):
        names = tuple(built) if isinstance(built, Mapping) else tuple(f"output_{k}" for k in range(len(results)))
        raise ModelError(
            f"{layer!r} returned {len(results)} results, but declares the outputs {', '.join(call.results)}",
            facts=[f"layer '{full}' at {call.location}"] if full else [],
            hint=f"declare them in the class: outputs = {names!r}",
        )
    return results


def _rename(value: Value, name: str) -> None:
    """Give the user's name to a result of the last node; older values keep their names."""
    builder = Builder.current()
    if builder.nodes and any(value is r for r in builder.nodes[-1].results):
        value.name = builder.unique(name)


def check_declared(name: str, value: Any, key: IOKey, sizes: dict[str, Any]) -> None:
    """Check a value against its IOKey; ``sizes`` holds the sizes bound to names so far, for the entire model."""
    if not isinstance(value, Value):
        return
    shape, declared_at = key.shape_declared, f"declared at {key.declared_at}"
    if key.dtype_declared is not None and value.dtype is not key.dtype_declared:
        raise DTypeError(
            f"Type mismatch: expected {key.dtype_declared}, got {value.dtype}",
            facts=[f"terminal '{name}', {declared_at}"],
            hint="insert a Cast layer, or set the dtype of the input with types=",
        )
    if shape is None:
        return
    declared, shape = shape, expanded(shape, len(value.shape)) or ()
    fits = len(shape) == len(value.shape)
    if fits:
        for size, actual in zip(shape, value.shape, strict=True):
            if isinstance(size, Dim) and size.symbol is not None and isinstance(actual, int):
                fits = fits and size.symbol.low <= actual and actual <= (size.symbol.high or actual)
                size = size.symbol.name
            if isinstance(size, str):
                size = sizes.setdefault(size, actual)
            if isinstance(size, (int, Dim)) and not assume(size, "==", actual, f"the declared shape of '{name}'"):
                fits = False
    if not fits:
        raise ShapeError(
            f"'{name}' has the shape [{', '.join(map(str, value.shape))}], declared as {declared_text(declared)}",
            facts=[declared_at],
            hint="declare a size that differs between calls as None or a name; importers have dynamic_shapes= for it",
        )
