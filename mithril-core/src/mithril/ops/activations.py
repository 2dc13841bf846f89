"""Activations: composites, with explicit gradients for those that training graphs should not decompose."""

from __future__ import annotations

import math

from mithril.graph import Arr, Axis, composite, exactly, per_input, sample
from mithril.ops.basic import downcast, upcast
from mithril.ops.elementwise import (
    abs as abs_,
    clip,
    erf,
    exp,
    greater,
    less,
    log,
    log1p,
    maximum,
    minimum,
    reciprocal,
    tanh,
    where,
)
from mithril.ops.reduction import max as max_, sum as sum_
from mithril.ops.shape import reshape
from mithril.ops.slicing import split

ANY = (sample((3, 4)), sample(Arr((2, 5), low=-12.0, high=12.0), label="wide"))


# -- rectifiers ---------------------------------------------------------------------------------------------------
@composite(elementwise=True, promotes="same", flops=1, samples=ANY, activation="relu")
def relu(x):
    """max(x, 0); the gradient at 0 is 0."""
    return maximum(x, 0)


@relu.vjp
def _(g, y, x):
    return (where(greater(y, 0), g, 0.0),)  # depends on the result only, so that x is not saved


@composite(elementwise=True, promotes="same", flops=2, samples=ANY, precision="follow", activation="relu6")
def relu6(x):
    """min(max(x, 0), 6)"""
    return clip(x, low=0.0, high=6.0)


@relu6.vjp
def _(g, y, x):
    return (where(greater(x, 0), where(less(x, 6.0), g, 0.0), 0.0),)


@composite(
    elementwise=True,
    promotes="float",
    flops=2,
    samples=[*ANY, sample((3, 4), slope=0.2, label="slope")],
    precision="follow",
    activation="leaky_relu",
)
def leaky_relu(x, *, slope: float = 0.01):
    """x, or slope * x where negative."""
    return where(greater(x, 0.0), x, x * slope)


@leaky_relu.vjp
def _(g, y, x, *, slope):
    return (where(greater(x, 0.0), g, g * slope),)


@composite(promotes="float", flops=2, samples=[sample((2, 3, 4), (3,)), sample((2, 3), (), label="one slope")])
def prelu(x, slope):
    """x, or slope * x where negative, with one learned slope or one per channel (axis 1)."""
    if len(slope.shape) == 1 and len(x.shape) > 2:
        slope = reshape(slope, shape=(slope.shape[0], *[1] * (len(x.shape) - 2)))
    return where(greater(x, 0.0), x, x * slope)


@composite(
    elementwise=True,
    promotes="float",
    flops=14,
    samples=[*ANY, sample((3, 4), alpha=0.5, label="alpha")],
    precision="follow",
    activation="elu",
)
def elu(x, *, alpha: float = 1.0):
    """x, or alpha * (exp(x) - 1) where negative."""
    from mithril.ops.elementwise import expm1

    return where(greater(x, 0.0), x, expm1(minimum(x, 0.0)) * alpha)


@elu.vjp
def _(g, y, x, *, alpha):
    return (where(greater(x, 0.0), g, g * exp(minimum(x, 0.0)) * alpha),)


@composite(
    elementwise=True,
    promotes="float",
    flops=14,
    samples=[*ANY, sample((3, 4), alpha=0.5, label="alpha")],
    activation="celu",
)
def celu(x, *, alpha: float = 1.0):
    """x, or alpha * (exp(x / alpha) - 1) where negative; continuously differentiable for every alpha."""
    from mithril.ops.elementwise import expm1

    return where(greater(x, 0.0), x, expm1(minimum(x, 0.0) * (1.0 / alpha)) * alpha)


@composite(elementwise=True, promotes="float", flops=15, samples=ANY, precision="follow", activation="selu")
def selu(x):
    """Self-normalizing elu: elu(x, 1.6733) * 1.0507."""
    return elu(x, alpha=1.6732632423543772) * 1.0507009873554805


@composite(elementwise=True, promotes="float", flops=3, samples=ANY, precision="follow", activation="hard_tanh")
def hard_tanh(x, *, low: float = -1.0, high: float = 1.0):
    """min(max(x, low), high)"""
    return clip(x, low=low, high=high)


@composite(elementwise=True, promotes="float", flops=4, samples=ANY, precision="follow", activation="hard_sigmoid")
def hard_sigmoid(x):
    """clip(x / 6 + 1/2, 0, 1)"""
    return clip(x * (1.0 / 6.0) + 0.5, low=0.0, high=1.0)


@composite(elementwise=True, promotes="float", flops=5, samples=ANY, precision="follow", activation="hard_swish")
def hard_swish(x):
    """x * hard_sigmoid(x)"""
    return x * clip(x * (1.0 / 6.0) + 0.5, low=0.0, high=1.0)


@composite(elementwise=True, promotes="float", flops=4, samples=[sample((3, 4), bound=0.5)])
def softshrink(x, *, bound: float = 0.5):
    """sign(x) * max(|x| - bound, 0)"""
    return x - clip(x, low=-bound, high=bound)


# -- sigmoids -----------------------------------------------------------------------------------------------------
@composite(elementwise=True, promotes="float", flops=16, samples=ANY, precision="follow", activation="sigmoid")
def sigmoid(x):
    """1 / (1 + exp(-x)); an overflow of exp yields 0."""
    return reciprocal(exp(-x) + 1.0)


@sigmoid.vjp
def _(g, y, x):
    return (g * y * (1.0 - y),)


@composite(elementwise=True, promotes="float", flops=28, samples=ANY, activation="log_sigmoid")
def log_sigmoid(x):
    """log(sigmoid(x)), accurate for large negative x."""
    return -softplus(-x)


@composite(elementwise=True, promotes="float", flops=28, samples=ANY, activation="softplus")
def softplus(x):
    """log(1 + exp(x)) without overflow."""
    return maximum(x, 0.0) + log1p(exp(-abs_(x)))


@softplus.vjp
def _(g, y, x):
    return (g * sigmoid(x),)


@composite(elementwise=True, promotes="float", flops=6, samples=ANY, activation="softsign")
def softsign(x):
    """x / (1 + |x|)"""
    return x / (abs_(x) + 1.0)


@composite(elementwise=True, promotes="float", flops=18, samples=ANY, precision="follow", activation="silu")
def silu(x):
    """x * sigmoid(x)"""
    return x * sigmoid(x)


@silu.vjp
def _(g, y, x):
    s = sigmoid(x)
    return (g * (s + y * (1.0 - s)),)


@composite(elementwise=True, promotes="float", flops=45, samples=ANY, activation="mish")
def mish(x):
    """x * tanh(softplus(x))"""
    return x * tanh(softplus(x))


@mish.vjp
def _(g, y, x):
    t = tanh(softplus(x))
    return (g * (t + x * sigmoid(x) * (1.0 - t * t)),)


@composite(
    elementwise=True,
    promotes="float",
    flops=26,
    tolerance=2.0,
    samples=[*ANY, sample((3, 4), approximate="tanh", label="tanh")],
    precision="follow",
    activation="gelu",
)
def gelu(x, *, approximate: str = "none"):
    """x * Phi(x) with the normal distribution function Phi, computed with erf or approximated with tanh."""
    from mithril.graph import OperationError, unknown

    if approximate == "none":
        return downcast(upcast(x) * ((erf(upcast(x) * math.sqrt(0.5)) + 1.0) * 0.5), x)
    if approximate != "tanh":
        message, facts, hint = unknown("approximation of gelu", approximate, ["none", "tanh"])
        raise OperationError(message, facts=facts, hint=hint)
    z = upcast(x)
    inner = (z + z * z * z * 0.044715) * math.sqrt(2.0 / math.pi)
    return downcast(z * ((tanh(inner) + 1.0) * 0.5), x)


@gelu.vjp
def _(g, y, x, *, approximate):
    z = upcast(x)
    if approximate == "none":
        phi = (erf(z * math.sqrt(0.5)) + 1.0) * 0.5
        slope = phi + z * exp(z * z * -0.5) * (1.0 / math.sqrt(2.0 * math.pi))
    else:
        t = tanh((z + z * z * z * 0.044715) * math.sqrt(2.0 / math.pi))
        inner = (z * z * (3.0 * 0.044715) + 1.0) * math.sqrt(2.0 / math.pi)
        slope = (t + 1.0) * 0.5 + z * (1.0 - t * t) * inner * 0.5
    return (downcast(upcast(g) * slope, x),)


# -- over an axis -------------------------------------------------------------------------------------------------
ROWS = (
    sample((3, 5)),
    sample((2, 3, 4), axis=1, label="axis"),
    sample(Arr((2, 6), low=-60.0, high=60.0), label="wide"),
    sample(exactly(float("-inf"), float("-inf"), shape=(1, 2)), label="all -inf", gradient=False),
    sample(exactly(float("-inf"), 1.0, 2.0, shape=(1, 3)), label="-inf", gradient=False),
)


@composite(promotes="float", flops=per_input(17), samples=ROWS)
def softmax(x, *, axis: Axis = -1):
    """exp(x) / sum(exp(x)) along an axis; nan for rows of -inf."""
    z = upcast(x)
    e = exp(z - max_(z, axis=axis, keepdims=True))
    return downcast(e / sum_(e, axis=axis, keepdims=True), x)


@softmax.vjp
def _(g, y, x, *, axis):
    p, c = upcast(y), upcast(g)
    t = c * p
    return (downcast(t - p * sum_(t, axis=axis, keepdims=True), x),)


@composite(promotes="float", flops=per_input(17), samples=ROWS)
def log_softmax(x, *, axis: Axis = -1):
    """log(softmax(x)) without underflow."""
    z = upcast(x)
    shifted = z - max_(z, axis=axis, keepdims=True)
    return downcast(shifted - log(sum_(exp(shifted), axis=axis, keepdims=True)), x)


@log_softmax.vjp
def _(g, y, x, *, axis):
    c = upcast(g)
    return (downcast(c - exp(upcast(y)) * sum_(c, axis=axis, keepdims=True), x),)


@composite(
    promotes="float",
    flops=per_input(9),
    samples=[sample((3, 4)), sample((4, 3), axis=0, label="axis")],
    precision="follow",
)
def glu(x, *, axis: Axis = -1):
    """a * sigmoid(b), where a and b are the first and second half of an axis."""
    half = x.shape[axis] // 2
    a, b = split(x, sizes=(half, half), axis=axis)
    return a * sigmoid(b)


@composite(promotes="float", flops=per_input(10), samples=[sample((3, 4))], precision="follow")
def swiglu(x, *, axis: Axis = -1):
    """silu(a) * b, where a and b are the first and second half of an axis."""
    half = x.shape[axis] // 2
    a, b = split(x, sizes=(half, half), axis=axis)
    return silu(a) * b
