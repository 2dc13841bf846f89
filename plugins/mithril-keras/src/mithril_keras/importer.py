"""Functional and sequential models: the calls of their layers, in the order of their data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mithril.graph import InputError, UnsupportedError
from mithril_keras.config import (
    IGNORED,
    IGNORED_SUFFIXES,
    REMEDY,
    Call,
    LayerConfig,
    Reference,
    groups,
    layer_config,
    references,
    references_within,
)
from mithril_keras.table import LAYERS, OPERATIONS, Row
from mithril_keras.tensor import Tensor
from mithril_keras.weights import Weights


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
        if len(inputs) != len(self.inputs):
            raise InputError(f"the model '{self.config.name}' has {len(self.inputs)} inputs, got {len(inputs)}")
        if self.sequential:
            x: Any = inputs[0]
            for layer in self.layers:
                x = x if layer.class_name == "InputLayer" else self._call(weights, layer, Call((x,), {}), {})
            return [_tensor(x, self.config.name)]
        env: dict[tuple[str, int], Any] = {}
        for (_, r), x in zip(self.inputs, inputs, strict=True):
            env[r.layer, r.node] = x
        for layer, number in self._order(env):
            env[layer.name, number] = self._call(weights, layer, layer.calls[number], env)
        return [_result(env, r) for _, r in self.outputs]

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
            operands = [(r.layer, r.node) for r in references_within([list(call.args), dict(call.kwargs)])]
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

    def _call(self, weights: Weights, layer: LayerConfig, call: Call, env: Mapping[tuple[str, int], Any]) -> Any:
        args = [_resolved(a, env) for a in call.args]
        kwargs = {k: _resolved(v, env) for k, v in call.kwargs.items() if v is not None}
        if layer.is_operation:
            row = OPERATIONS[layer.class_name]
            return apply(row, _label(layer), weights, layer.settings, args, kwargs)
        inner = weights.below(f"layers/{self.groups[id(layer)]}", layer.name)
        training = kwargs.pop("training", None)
        inner = replace(
            inner,
            label=_label(layer),
            policy=layer.dtype,
            trainable=weights.trainable and layer.trainable,
            training=weights.training if training is None else bool(training),
        )
        if id(layer) in self.networks:
            results = self.networks[id(layer)].run(inner, list(tensors_within(args + [list(kwargs.values())])))
            return results[0] if len(results) == 1 else results
        return call_layer(inner, layer, args, kwargs)


def call_layer(weights: Weights, layer: LayerConfig, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the result of one layer, with masks as Keras passes them on."""
    row = LAYERS[layer.class_name]
    result = apply(row, _label(layer), weights, layer.settings, args, kwargs)
    mask = next((t.mask for t in tensors_within(list(args))), None)
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
        facts = [f"{kind}: {', '.join(names[:3])}{' ...' if len(names) > 3 else ''}" for kind, names in missing.items()]
        noun = "kind of layer has" if len(missing) == 1 else "kinds of layers have"
        raise UnsupportedError(
            f"{len(missing)} {noun} no counterpart, in '{name}'",
            facts=facts,
            hint="replace them in Keras by layers or operations of keras.ops, and save the model again",
        )


def _label(layer: LayerConfig) -> str:
    return f"the layer '{layer.name}' ({layer.class_name})"


def _resolved(value: Any, env: Mapping[tuple[str, int], Any]) -> Any:
    if isinstance(value, Reference):
        return _result(env, value)
    if isinstance(value, list):
        return [_resolved(v, env) for v in value]
    if isinstance(value, dict):
        return {k: _resolved(v, env) for k, v in value.items()}
    return value


def _result(env: Mapping[tuple[str, int], Any], r: Reference) -> Tensor:
    value = env.get((r.layer, r.node))
    if isinstance(value, (list, tuple)):
        value = value[r.tensor] if 0 <= r.tensor < len(value) else None
    elif r.tensor:
        value = None
    return _tensor(value, r.layer)


def _tensor(value: Any, name: str) -> Tensor:
    if not isinstance(value, Tensor):
        raise InputError(f"the layer '{name}' has no such result")
    return value


def tensors_within(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in arguments."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from tensors_within(v)
    elif isinstance(value, dict):
        for v in value.values():
            yield from tensors_within(v)
