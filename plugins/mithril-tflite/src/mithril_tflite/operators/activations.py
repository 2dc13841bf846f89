"""Activations, as operators and fused into others."""

from __future__ import annotations

from typing import Any

from mithril import ops
from mithril.graph import UnsupportedError
from mithril_tflite.table import Weight, operator

NONE, RELU, RELU_N1_TO_1, RELU6, TANH, SIGN_BIT = range(6)
FUSED: Any = {
    RELU: lambda y: ops.relu(y) if y.dtype.is_float else ops.clip(y, low=0),
    RELU_N1_TO_1: lambda y: ops.clip(y, low=-1.0, high=1.0),
    RELU6: lambda y: ops.relu6(y) if y.dtype.is_float else ops.clip(y, low=0, high=6),
    TANH: ops.tanh,
}


def activated(y, code):
    """Return a fused activation of a result."""
    if code not in FUSED:
        raise UnsupportedError(
            f"the fused activation {'SIGN_BIT' if code == SIGN_BIT else code} is not supported",
            facts=["accepted: NONE, RELU, RELU_N1_TO_1, RELU6, TANH"],
        )
    return FUSED[code](y)


operator(lambda x: ops.relu(x), name="RELU")
operator(lambda x: ops.relu6(x), name="RELU6")
operator(lambda x: ops.clip(x, low=-1.0, high=1.0), name="RELU_N1_TO_1")
operator(lambda x: ops.clip(x, low=0.0, high=1.0), name="RELU_0_TO_1")
operator(lambda x: ops.tanh(x), name="TANH")
operator(lambda x: ops.sigmoid(x), name="LOGISTIC")
operator(lambda x: ops.elu(x), name="ELU")
operator(lambda x: ops.hard_swish(x), name="HARD_SWISH")
operator(lambda x: ops.log_softmax(x, axis=-1), name="LOG_SOFTMAX")


@operator
def LEAKY_RELU(x, *, alpha):
    return ops.leaky_relu(x, slope=alpha)


@operator
def PRELU(x, alpha: Weight):
    return ops.where(ops.greater_equal(x, 0.0), x, x * alpha)  # alpha broadcasts along any axis


@operator
def GELU(x, *, approximate):
    return ops.gelu(x, approximate="tanh" if approximate else "none")


@operator
def SOFTMAX(x, *, beta):
    return ops.softmax(x if beta == 1.0 else x * beta, axis=-1)
