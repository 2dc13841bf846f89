"""Parameters under the names of a checkpoint, and the operations that use them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

from mithril import ops
from mithril.base import UnsupportedError
from mithril.models import Layer

# Names of configurations for activations of operations.
OTHER_NAMES = {**dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), "gelu_tanh"), "swish": "silu"}


def activation_name(name: str) -> str:
    """Return the name by which operations know the activation of that name in a configuration."""
    operation = OTHER_NAMES.get(name, name)
    if operation not in ops.ANY_ACTIVATION:
        raise UnsupportedError(
            f"the activation '{name}' is not supported",
            facts=[f"supported: {', '.join([*ops.ANY_ACTIVATION, *OTHER_NAMES])}"],
        )
    return operation


def activate(name: str, x: Any) -> Any:
    """Apply the activation of that name in a configuration."""
    return ops.ANY_ACTIVATION[activation_name(name)](x)


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


@dataclass(frozen=True)
class Weights:
    """The parameters below ``path``, created by the layer when they are used."""

    layer: Layer
    dtype: str
    path: str
    style: Style
    transposes: bool = True

    def below(self, path: str) -> Weights:
        """Return the parameters below a further part of the path."""
        return replace(self, path=self.path + path)

    def param(self, name: str, shape: tuple[int, ...], init: str = "normal(std=0.02)") -> Any:
        """Return a parameter."""
        return self.layer.param(self.path + name, shape, init, self.dtype)

    def linear(self, name: str, x: Any, size: int, *, bias: bool = False) -> Any:
        """Return a product with the weight of that name, and its bias."""
        inputs = x.shape[-1]
        b = self.param(f"{name}.bias", (size,), "zeros") if bias else None
        if self.style.input_major and self.transposes:
            y = ops.matmul(x, self.param(f"{name}.weight", (inputs, size)))
            return y if b is None else y + b
        return ops.linear(x, self.param(f"{name}.weight", (size, inputs)), b)

    def norm(self, name: str, x: Any) -> Any:
        """Return the norm of the last axis."""
        size, style = x.shape[-1], self.style
        w = self.param(f"{name}.weight", (size,), "zeros" if style.norm_offset else "ones")
        if style.norm == "layer":
            return ops.layer_norm(x, w, self.param(f"{name}.bias", (size,), "zeros"), eps=style.eps)
        return ops.rms_norm(x, w + style.norm_offset if style.norm_offset else w, eps=style.eps)
