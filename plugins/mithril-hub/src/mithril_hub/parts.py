"""The leaves of pretrained models: layers of one parameter, under the names of a checkpoint."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from mithril import ops
from mithril.models import Embedding, Layer, Linear, shared_parameter

INIT = "normal(std=0.02)"


@runtime_checkable
class Style(Protocol):
    """The settings of a configuration that concern single parameters."""

    @property
    def eps(self) -> float: ...
    @property
    def norm(self) -> str: ...
    @property
    def norm_offset(self) -> float: ...
    @property
    def input_major(self) -> bool: ...


class Table(Embedding):
    """An embedding, whose weight ``logits_of_table`` uses, too."""

    def __init__(self, vocabulary: int, size: int, dtype: str) -> None:
        super().__init__(vocabulary, size, INIT)
        self.dtype = dtype

    def build(self, indices: Any) -> Any:
        return ops.embedding(indices, self.param("weight", (self.vocabulary, self.size), self.init, self.dtype))


def logits_of_table(x: Any, table: Layer, vocabulary: int, dtype: str, bias: Any = None) -> Any:
    """Return logits by the weight of a table, to which the layers around it may have added."""
    return ops.linear(x, shared_parameter(table, "weight", (vocabulary, x.shape[-1]), INIT, dtype), bias)


class Projection(Linear):
    """A linear layer, whose weight is [in, out] with ``input_major``."""

    def __init__(self, inputs: int, outputs: int, dtype: str, *, bias: bool = False, input_major: bool = False) -> None:
        super().__init__(inputs, outputs, bias=bias, init=INIT)
        self.dtype = dtype
        self.input_major = input_major

    def build(self, x: Any) -> Any:
        size, out = self.in_features, self.out_features
        w = self.param("weight", (size, out) if self.input_major else (out, size), INIT, self.dtype)
        b = self.param("bias", (out,), "zeros", self.dtype) if self.bias else None
        if not self.input_major:
            return ops.linear(x, w, b)
        y = ops.matmul(x, w)
        return y if b is None else y + b


class Norm(Layer):
    """Layer norm or RMS norm of the last axis."""

    weights = ("weight", "bias")

    def __init__(self, size: int, style: Style, dtype: str) -> None:
        self.size = size
        self.kind, self.eps, self.offset = style.norm, style.eps, style.norm_offset
        self.dtype = dtype

    def build(self, x: Any) -> Any:
        w = self.param("weight", (self.size,), "zeros" if self.offset else "ones", self.dtype)
        if self.kind == "layer":
            return ops.layer_norm(x, w, self.param("bias", (self.size,), "zeros", self.dtype), eps=self.eps)
        return ops.rms_norm(x, w + self.offset if self.offset else w, eps=self.eps)
