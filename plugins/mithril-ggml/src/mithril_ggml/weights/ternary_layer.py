"""``TernaryLinear``: a dense layer whose weights are -s, 0 or s. It trains on any backend and deploys to 2 bits."""

from __future__ import annotations

from typing import Any

from mithril.graph import Value, operation
from mithril.models import Layer, expect_size, in_and_out


class TernaryLinear(Layer):
    """``x @ ternarize(weight).T + bias``. Training moves the full weight underneath, through which gradients pass.

    Compiled for the GGML backend with any ``quantize=``, the weight is held in TQ2_0, 2.06 bits each, without loss
    but the rounding of the scale to 16 bits, where its rows are multiples of 256 elements; in Q8_0 otherwise.
    """

    weights = ("weight", "bias")

    def __init__(self, *features: int, dimension: int | None = None, bias: bool = True) -> None:
        self.in_features, self.out_features = in_and_out("TernaryLinear", features, dimension)
        self.bias = bias

    def expects(self, terminal: str) -> Any:
        return ((None, self.in_features), None) if terminal == "input" and self.in_features else None

    def build(self, x: Value) -> Any:
        size = expect_size(x, -1, self.in_features, "features")
        w = self.param("weight", (self.out_features, size), f"fan_in_uniform(fan_in={size})")
        b = self.param("bias", (self.out_features,), f"fan_in_uniform(fan_in={size})") if self.bias else None
        return operation("linear")(x, operation("ternarize")(w), b)
