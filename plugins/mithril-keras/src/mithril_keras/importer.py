"""Functional and sequential models: the calls of their layers, in the order of their data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, TypeVar

from mithril.graph import InputError, UnsupportedError
from mithril_importing.regions import Read, Scope
from mithril_importing.support import missing_lines
from mithril_keras.config import (
    IGNORED,
    IGNORED_SUFFIXES,
    REMEDY,
    LayerConfig,
    Reference,
    groups,
    layer_config,
    references,
)
from mithril_keras.table import LAYERS, OPERATIONS, Row
from mithril_keras.tensor import Tensor
from mithril_keras.weights import Weights, layer_path

T = TypeVar("T")
Enter = Callable[[Weights], Weights]
Results: TypeAlias = "LayerCall | list[str]"


class Network:
    """A model of the configuration: its layers with their groups in the file, its inputs and its outputs."""

    def __init__(self, config: LayerConfig) -> None:
        self.config = config
        label = f"the model '{config.name}'"
        content = config.settings.get("layers")
        if not isinstance(content, list) or not content:
            raise InputError(f"{label} has no list of layers")
        self.layers = [layer_config(v, f"layer {k} of {label}") for k, v in enumerate(content)]
        self.sequential = config.class_name == "Sequential"
        # The InputLayer of a Sequential is not among the layers that Keras numbers in the file of
        # weights.
        saved = [
            x for x in self.layers if not x.is_operation and not (self.sequential and x.class_name == "InputLayer")
        ]
        self.groups = {id(x): g for x, g in zip(saved, groups([x.class_name for x in saved]), strict=True)}
        self.networks = {id(x): Network(x) for x in self.layers if x.is_model}
        names = [x.name for x in self.layers]
        if len(set(names)) != len(names):
            raise InputError(f"{label} has two layers of one name", facts=[f"names: {', '.join(names[:20])}"])
        self.by_name = dict(zip(names, self.layers, strict=True))
        if self.sequential:
            self.inputs, self.outputs = self._chain_ends()
        else:
            self.inputs = references(config.settings.get("input_layers"), f"the inputs of {label}")
            self.outputs = references(config.settings.get("output_layers"), f"the outputs of {label}")

    def _chain_ends(self) -> tuple[list[Any], list[Any]]:
        first, last = self.layers[0], self.layers[-1]
        if first.class_name != "InputLayer":
            first = replace(first, class_name="InputLayer", name=f"{first.name}_input")
        return [(None, Reference(first.name, 0, 0))], [(None, Reference(last.name, 0, 0))]

    def walk(self) -> Iterator[LayerConfig]:
        """Yield all layers, with those of nested models."""
        for x in self.layers:
            yield x
            if id(x) in self.networks:
                yield from self.networks[id(x)].walk()

    def input_type(self, index: int) -> tuple[list[int | None] | None, str]:
        """Return the declared shape, with None for any size, and the dtype of an input."""
        layer = self.by_name.get(self.inputs[index][1].layer)
        shape: Any = None
        dtype = "float32"
        if layer is not None and layer.class_name == "InputLayer":
            shape = layer.settings.get("batch_shape", layer.settings.get("batch_input_shape"))
            dtype = layer.dtype
        elif self.sequential:
            shape = self.config.settings.get("build_input_shape")
            if shape is None and isinstance(self.config.build, Mapping):
                shape = self.config.build.get("input_shape")
            # Without an InputLayer the configuration has a shape, but no dtype.
            if self.layers[0].class_name == "Embedding":
                dtype = "int32"
        if shape is None:
            return None, dtype
        if not isinstance(shape, list) or not all(n is None or (type(n) is int and n >= 0) for n in shape):
            raise InputError(f"the input {index} of the model '{self.config.name}' has the shape {str(shape)[:80]}")
        return shape, dtype

    # -- running ------------------------------------------------------------------------------------------------------
    def run(self, weights: Weights, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the outputs for tensors."""
        names = [f"input:{k}" for k in range(len(inputs))]
        calls, outputs = self.calls(names)
        values = dict(zip(names, inputs, strict=True))
        for call in calls:
            call.run(weights, values)
        return [values[name] for name in outputs]

    def calls(self, inputs: Sequence[str]) -> tuple[list[LayerCall], list[str]]:
        """Return the calls of layers in the order of their data, with those of nested models, and names of the outputs.

        ``inputs`` are names of values.
        """
        calls: list[LayerCall] = []
        return calls, self._trace(inputs, "", (), lambda weights: weights, calls)

    def _trace(
        self, inputs: Sequence[str], key: str, scopes: tuple[Scope, ...], enter: Enter, calls: list[LayerCall]
    ) -> list[str]:
        if len(inputs) != len(self.inputs):
            raise InputError(f"the model '{self.config.name}' has {len(self.inputs)} inputs, got {len(inputs)}")
        if self.sequential:
            last: Results = list(inputs)
            for layer in self.layers:
                if layer.class_name != "InputLayer":
                    x = Read(_name(last, Reference(self.config.name, 0, 0)))
                    last = self._call(layer, 0, (x,), {}, key, scopes, enter, calls)
            return [_name(last, Reference(self.config.name, 0, 0))]
        env: dict[tuple[str, int], Results] = {}
        for (_, r), name in zip(self.inputs, inputs, strict=True):
            env[r.layer, r.node] = [name]
        for layer, number in self._order(env):
            call = layer.calls[number]
            args = tuple(_named(a, env) for a in call.args)
            kwargs = {k: _named(v, env) for k, v in call.kwargs.items() if v is not None}
            env[layer.name, number] = self._call(layer, number, args, kwargs, key, scopes, enter, calls)
        return [_name(env[r.layer, r.node], r) for _, r in self.outputs]

    def _order(self, env: Mapping[tuple[str, int], Any]) -> list[tuple[LayerConfig, int]]:
        """Return the calls that the outputs depend on, producers first."""
        order: list[tuple[LayerConfig, int]] = []
        state: dict[tuple[str, int], bool] = dict.fromkeys(env, True)  # False while the operands are visited
        stack = [(r.layer, r.node) for _, r in reversed(self.outputs)]
        while stack:
            key = stack[-1]
            if state.get(key):
                stack.pop()
                continue
            layer = self.by_name.get(key[0])
            if layer is None or not 0 <= key[1] < len(layer.calls):
                raise InputError(
                    f"the model '{self.config.name}' refers to call {key[1]} of '{key[0]}', which it lacks"
                )
            call = layer.calls[key[1]]
            operands = [(r.layer, r.node) for r in _within(Reference, [call.args, call.kwargs])]
            missing = [k for k in operands if not state.get(k)]
            if not missing:
                order.append((layer, key[1]))
                state[key] = True
                stack.pop()
            elif state.get(key) is False:
                raise InputError(f"the model '{self.config.name}' has a cycle through the layer '{key[0]}'")
            else:
                state[key] = False
                stack += reversed(missing)
        return order

    def _call(
        self,
        layer: LayerConfig,
        number: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outer: str,
        scopes: tuple[Scope, ...],
        enter: Enter,
        calls: list[LayerCall],
    ) -> Results:
        """Add the calls of a layer, and return their results."""
        key = f"{outer}.{layer.name}" if outer else layer.name
        key = f"{key}:{number}" if number else key
        path = layer_path(layer.name)
        scopes = (*scopes, Scope(f"{scopes[-1].path}.{path}" if scopes else path, key))
        if layer.is_operation:
            calls.append(LayerCall(layer, args, kwargs, scopes, enter, key))
            return calls[-1]
        training = kwargs.pop("training", None)

        def inner(weights: Weights) -> Weights:
            around = enter(weights)
            return replace(
                around.below(f"layers/{self.groups[id(layer)]}", layer.name),
                label=_label(layer),
                policy=layer.dtype,
                trainable=around.trainable and layer.trainable,
                training=around.training if training is None else bool(training),
            )

        if id(layer) in self.networks:
            inputs = [r.name for r in _within(Read, [*args, *kwargs.values()])]
            return self.networks[id(layer)]._trace(inputs, key, scopes, inner, calls)
        calls.append(LayerCall(layer, args, kwargs, scopes, inner, key))
        return calls[-1]


@dataclass(frozen=True, eq=False)
class LayerCall:
    """A call of a layer: its arguments, in which tensors are names, and the names of the results that are read."""

    layer: LayerConfig
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    scopes: tuple[Scope, ...]  # the layer, and the models around it
    weights: Enter  # from those of the whole model
    key: str
    results: dict[int, str] = field(default_factory=dict)

    @property
    def reads(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(r.name for r in _within(Read, [*self.args, *self.kwargs.values()])))

    @property
    def masked_like(self) -> str | None:
        """The value whose mask the result has."""
        passes = not self.layer.is_operation and LAYERS[self.layer.class_name].masks == "pass"
        return next((r.name for r in _within(Read, self.args)), None) if passes else None

    def name(self, index: int) -> str:
        """Return the name of a result."""
        return self.results.setdefault(index, f"{self.key}:{index}" if index else self.key)

    def run(self, weights: Weights, values: dict[str, Tensor]) -> None:
        """Set the results in ``values``; ``weights`` are those of the whole model."""
        layer, args = self.layer, [_resolved(a, values) for a in self.args]
        kwargs = {k: _resolved(v, values) for k, v in self.kwargs.items()}
        if layer.is_operation:
            row = OPERATIONS[layer.class_name]
            result = apply(row, _label(layer), self.weights(weights), layer.settings, args, kwargs)
        else:
            result = call_layer(self.weights(weights), layer, args, kwargs)
        results = result if isinstance(result, (list, tuple)) else [result]
        for index, name in self.results.items():
            tensor = results[index] if 0 <= index < len(results) else None
            if not isinstance(tensor, Tensor):
                raise _no_result(layer.name)
            values[name] = tensor


def call_layer(weights: Weights, layer: LayerConfig, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the result of one layer, with masks as Keras passes them on."""
    row = LAYERS[layer.class_name]
    result = apply(row, _label(layer), weights, layer.settings, args, kwargs)
    mask = next((t.mask for t in _within(Tensor, list(args))), None)
    if row.masks == "own" or not isinstance(result, Tensor):
        return result
    return result.with_mask(mask if row.masks == "pass" else None)


def apply(row: Row, label: str, weights: Weights, settings: Mapping[str, Any], args: Any, kwargs: Any) -> Any:
    """Call the function of a row with the settings and the arguments of the call that it declares."""
    options: dict[str, Any] = {}
    for key, value in {**settings, **kwargs}.items():
        if key in row.keywords or row.takes_all:
            options[key] = value
        elif not (key in IGNORED or key.endswith(IGNORED_SUFFIXES) or _is_off(value)):
            raise UnsupportedError(
                f"the setting {key}={str(value)[:60]} of {label} is not supported",
                facts=[f"read: {', '.join(k for k in row.keywords if k not in ('weights', 'x'))}"],
                hint=REMEDY,
            )
    return row.function(weights, *args, **options)


def _is_off(value: Any) -> bool:
    return value is None or value is False or (isinstance(value, (list, dict, str)) and not value)


def check_supported(network: Network, name: str) -> None:
    """Raise UnsupportedError that lists every layer without a counterpart."""
    missing: dict[str, list[str]] = {}
    for x in network.walk():
        if x.custom is not None:
            missing.setdefault(f"{x.custom} (a class of the user: its code is not in the file)", []).append(x.name)
        elif x.class_name == "Lambda" and not x.is_operation:
            missing.setdefault("Lambda (code of Python, which mithril does not run)", []).append(x.name)
        elif not x.is_model and x.class_name not in (OPERATIONS if x.is_operation else LAYERS):
            kind = f"keras.ops {x.class_name}" if x.is_operation else x.class_name
            missing.setdefault(kind, []).append(x.name)
    if missing:
        noun = "kind of layer has" if len(missing) == 1 else "kinds of layers have"
        raise UnsupportedError(
            f"{len(missing)} {noun} no counterpart, in '{name}'",
            facts=missing_lines(missing),
            hint="replace them in Keras by layers or operations of keras.ops, and save the model again",
        )


def _label(layer: LayerConfig) -> str:
    return f"the layer '{layer.name}' ({layer.class_name})"


def _named(value: Any, env: Mapping[tuple[str, int], Results]) -> Any:
    """Return arguments with the names of results in place of references."""
    return _mapped(value, Reference, lambda r: Read(_name(env[r.layer, r.node], r)))


def _name(results: Results, r: Reference) -> str:
    if isinstance(results, LayerCall):
        return results.name(r.tensor)
    if not 0 <= r.tensor < len(results):
        raise _no_result(r.layer)
    return results[r.tensor]


def _no_result(layer: str) -> InputError:
    return InputError(f"the layer '{layer}' has no such result")


def _resolved(value: Any, values: Mapping[str, Tensor]) -> Any:
    return _mapped(value, Read, lambda r: values[r.name])


def _mapped(value: Any, kind: type, function: Callable[[Any], Any]) -> Any:
    """Return containers with a function of the elements of this type."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, list):
        return [_mapped(v, kind, function) for v in value]
    if isinstance(value, dict):
        return {k: _mapped(v, kind, function) for k, v in value.items()}
    return value


def _within(kind: type[T], value: Any) -> Iterator[T]:
    """Yield the elements of this type in arguments."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from _within(kind, v)
    elif isinstance(value, dict):
        for v in value.values():
            yield from _within(kind, v)
