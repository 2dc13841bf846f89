"""The configuration of a saved model: objects as Keras serializes them, as plain Python values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mithril.graph import InputError, UnsupportedError

LARGEST_CONSTANT = 1 << 24  # elements

# Keys that do not affect results. Initializers, regularizers and constraints have these suffixes.
_BASE = ("name", "trainable", "dtype", "seed", "batch_shape", "batch_input_shape", "autocast", "implementation")
IGNORED = frozenset((*_BASE, "unroll", "use_cudnn", "synchronized", "unit_forget_bias", "lora_rank", "lora_alpha"))
IGNORED_SUFFIXES = ("_initializer", "_regularizer", "_constraint")

CLASSES = {"GroupQueryAttention": "GroupedQueryAttention"}  # class names that differ from the exported ones
MODELS = ("Functional", "Sequential", "Model")
CODE = "code: a function of Python, which mithril does not run"


@dataclass(frozen=True)
class Reference:
    """A result of an earlier call of a layer."""

    layer: str
    node: int
    tensor: int


@dataclass(frozen=True)
class Call:
    """A call of a layer."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True)
class LayerConfig:
    """A layer of a model: its class, its settings and the calls of it."""

    class_name: str
    name: str
    settings: Mapping[str, Any]
    is_operation: bool  # a function of keras.ops, which has no weights
    custom: str | None  # the registered name of a class of the user
    trainable: bool
    dtype: str
    calls: tuple[Call, ...] = ()
    build: Any = None

    @property
    def is_model(self) -> bool:
        return self.custom is None and not self.is_operation and self.class_name in MODELS


def layer_config(value: Any, label: str) -> LayerConfig:
    """Return a layer from the object that Keras serialized."""
    if not isinstance(value, Mapping) or not isinstance(value.get("config"), Mapping):
        raise InputError(f"{label} of the configuration is not a layer", facts=[f"{str(value)[:80]}"])
    settings = value["config"]
    module, class_name = str(value.get("module") or ""), str(value.get("class_name"))
    name = str(settings.get("name") or value.get("name") or class_name)
    nodes = value.get("inbound_nodes") or ()
    registered = value.get("registered_name")
    is_model = class_name in MODELS and module.startswith("keras")
    is_operation = module.startswith("keras.src.ops")
    custom = None
    if not (module == "keras" or module.startswith("keras.")):
        custom = str(registered or f"{module}.{class_name}")
    elif not is_model and not is_operation and registered and ">" in str(registered):
        custom = str(registered)
    calls = tuple(Call(*_arguments(n, label)) for n in nodes)
    trainable = bool(settings.get("trainable", True))
    kind = dtype_policy(settings.get("dtype"), label)
    build = value.get("build_config")
    return LayerConfig(class_name, name, settings, is_operation, custom, trainable, kind, calls, build)


def _arguments(node: Any, label: str) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    if not isinstance(node, Mapping):
        raise InputError(f"a call of {label} is not in the form of Keras 3", facts=[f"{str(node)[:80]}"])
    args, kwargs = plain(node.get("args", []), label), plain(node.get("kwargs", {}), label)
    if not isinstance(args, list) or not isinstance(kwargs, dict):
        raise InputError(f"a call of {label} has no list of arguments")
    return tuple(args), kwargs


def plain(value: Any, label: str) -> Any:
    """Return a serialized value: references for tensors, arrays, slices, containers of them."""
    if isinstance(value, list):
        return [plain(v, label) for v in value]
    if not isinstance(value, Mapping):
        return value
    kind, config = value.get("class_name"), value.get("config")
    if "class_name" not in value:
        return {k: plain(v, label) for k, v in value.items()}
    if kind == "__keras_tensor__":
        return reference(config["keras_history"] if isinstance(config, Mapping) else None, label)
    if kind == "__slice__" and isinstance(config, Mapping):
        return slice(*(config.get(k) for k in ("start", "stop", "step")))
    if kind == "__ellipsis__":
        return ...
    if kind in ("__tensor__", "__numpy__") and isinstance(config, Mapping):
        array = np.asarray(config.get("value"), config.get("dtype"))
        if array.dtype.kind not in "fiub" or array.size > LARGEST_CONSTANT:
            raise InputError(f"a constant of {label} is not an array of numbers")
        return array
    if kind in ("__lambda__", "function") and not isinstance(config, str):
        raise UnsupportedError(f"{label} contains {CODE}", hint=REMEDY)
    return value


REMEDY = "replace it in Keras by layers or operations of keras.ops, and save the model again"


def reference(history: Any, label: str) -> Reference:
    """Return the result that ``[layer, node, tensor]`` names."""
    if not isinstance(history, list) or len(history) != 3:
        raise InputError(f"{label} refers to {str(history)[:80]}", facts=["expected: [layer, node, tensor]"])
    layer, node, tensor = history
    return Reference(str(layer), int(node), int(tensor))


def references(value: Any, label: str) -> list[tuple[str | None, Reference]]:
    """Return the inputs or outputs of a model with their names, which only dictionaries give."""
    if isinstance(value, Mapping):
        return [(str(k), r) for k, v in value.items() for _, r in references(v, label)]
    if isinstance(value, list) and len(value) == 3 and isinstance(value[0], str) and isinstance(value[1], int):
        return [(None, reference(value, label))]
    if isinstance(value, list):
        return [item for v in value for item in references(v, label)]
    raise InputError(f"{label} lists {str(value)[:80]}", facts=["expected: [layer, node, tensor]"])


def dtype_policy(value: Any, label: str) -> str:
    """Return the name of a dtype policy: a dtype, or ``mixed_float16`` and ``mixed_bfloat16``."""
    name = value
    if isinstance(value, Mapping):
        if value.get("class_name") == "DTypePolicyMap":
            default = value.get("config", {}).get("default_policy")
            return dtype_policy(default, label)
        if value.get("class_name") not in ("DTypePolicy", "FloatDTypePolicy"):
            raise UnsupportedError(
                f"{label} is quantized by {value.get('class_name')}", facts=["read: float policies"], hint=REMEDY
            )
        name = value.get("config", {}).get("name")
    return str(name or "float32")


def snake_case(name: str) -> str:
    """Return the group of a class in the file of weights."""
    name = re.sub(r"\W+", "", name)
    name = re.sub(r"(.)([A-Z][a-z]+)", r"\1_\2", name)
    return re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower()


def groups(names: list[str]) -> list[str]:
    """Return the groups of layers by their classes, numbered where several are equal."""
    used: dict[str, int] = {}
    out = []
    for name in names:
        group = snake_case(CLASSES.get(name, name))
        count = used[group] = used.get(group, -1) + 1
        out.append(f"{group}_{count}" if count else group)
    return out
