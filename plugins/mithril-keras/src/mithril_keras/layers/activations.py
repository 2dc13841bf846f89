"""Activations: functions by name, and the layers that apply them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mithril import ops
from mithril.graph import UnsupportedError
from mithril_keras.table import layer
from mithril_keras.tensor import Tensor, elementwise
from mithril_keras.weights import Weights

LAST = ("softmax", "log_softmax", "glu")  # of the last axis; the others are elementwise
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "celu": ops.celu,
    "elu": ops.elu,
    "exponential": ops.exp,
    "gelu": ops.gelu,
    "glu": ops.glu,
    "hard_shrink": lambda x: ops.where(ops.greater(ops.abs(x), 0.5), x, 0.0),
    "hard_sigmoid": ops.hard_sigmoid,
    "hard_silu": ops.hard_swish,
    "hard_swish": ops.hard_swish,
    "hard_tanh": ops.hard_tanh,
    "leaky_relu": lambda x: ops.leaky_relu(x, slope=0.2),
    "linear": lambda x: x,
    "log_sigmoid": ops.log_sigmoid,
    "log_softmax": ops.log_softmax,
    "mish": ops.mish,
    "relu": ops.relu,
    "relu6": ops.relu6,
    "selu": ops.selu,
    "sigmoid": ops.sigmoid,
    "silu": ops.silu,
    "soft_shrink": ops.softshrink,
    "softmax": ops.softmax,
    "softplus": ops.softplus,
    "softsign": ops.softsign,
    "sparse_plus": lambda x: ops.where(ops.less(x, 1.0), ops.square(ops.maximum(x, -1.0) + 1.0) * 0.25, x),
    "sparse_sigmoid": lambda x: ops.clip((x + 1.0) * 0.5, low=0.0, high=1.0),
    "squareplus": lambda x: (x + ops.sqrt(ops.square(x) + 4.0)) * 0.5,
    "swish": ops.silu,
    "tanh": ops.tanh,
    "tanh_shrink": lambda x: x - ops.tanh(x),
}


def activation_function(name: Any, where: str) -> Callable[[Any], Any]:
    """Return the function of an activation as a configuration names it."""
    if isinstance(name, Mapping):  # {"class_name": "function", "config": "gelu"}, or a layer
        settings = name.get("config")
        if name.get("class_name") == "LeakyReLU" and isinstance(settings, Mapping):
            slope = settings.get("negative_slope", 0.3)
            return lambda x: ops.leaky_relu(x, slope=slope)
        name = settings if isinstance(settings, str) else name.get("class_name")
    function = FUNCTIONS.get(str(name or "linear").lower())
    if function is None:
        raise UnsupportedError(
            f"the activation '{name}' of {where} is not supported", facts=[f"read: {', '.join(FUNCTIONS)}"]
        )
    return function


def activate(x: Tensor, name: Any, where: str) -> Tensor:
    """Apply an activation to a tensor, in the layout that it has if the activation is elementwise."""
    function = activation_function(name, where)
    if name in LAST:
        return Tensor(function(x.value))
    return x if name in (None, "linear") else elementwise(function, x)


@layer("Activation", masks="pass")
def activation(weights: Weights, x: Tensor, *, activation: Any) -> Tensor:
    """Return an activation by name."""
    return activate(x, activation, weights.label)


@layer("ReLU", masks="pass")
def relu(
    weights: Weights, x: Tensor, *, max_value: float | None = None, negative_slope: float = 0.0, threshold: float = 0.0
) -> Tensor:
    """Return rectification with a bound, a slope below the threshold, and a threshold."""
    del weights

    def function(v: Any) -> Any:
        high = v if max_value is None else ops.minimum(v, max_value)
        if not negative_slope and not threshold:
            return ops.relu(high)
        return ops.where(ops.less(v, threshold), (v - threshold) * negative_slope, high)

    return elementwise(function, x)


@layer("LeakyReLU", masks="pass")
def leaky_relu(weights: Weights, x: Tensor, *, negative_slope: float = 0.3) -> Tensor:
    """Return a slope below zero."""
    del weights
    return elementwise(lambda v: ops.leaky_relu(v, slope=negative_slope), x)


@layer("ELU", masks="pass")
def elu(weights: Weights, x: Tensor, *, alpha: float = 1.0) -> Tensor:
    """Return an exponential below zero."""
    del weights
    return elementwise(lambda v: ops.elu(v, alpha=alpha), x)


@layer("PReLU", masks="pass")
def prelu(weights: Weights, x: Tensor, *, shared_axes: Sequence[int] | None = None) -> Tensor:
    """Return a slope below zero that is a parameter."""
    shape = list(x.shape[1:])
    for axis in shared_axes or ():
        shape[axis - 1] = 1
    alpha = weights.param("alpha", shape)
    return Tensor(ops.where(ops.greater(x.value, 0.0), x.value, x.value * alpha))


@layer("Softmax", masks="pass")
def softmax(weights: Weights, x: Tensor, *, axis: int | Sequence[int] = -1, mask: Any = None) -> Tensor:
    """Return softmax over one axis."""
    if not isinstance(axis, int):
        if len(axis) != 1:
            raise weights.unsupported(f"softmax over the axes {list(axis)}")
        axis = axis[0]
    v = x.value
    if mask is not None:
        v = ops.where(mask.value, v, -1e9)
    return Tensor(ops.softmax(v, axis=axis))
