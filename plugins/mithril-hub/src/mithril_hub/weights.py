"""Layers and parameters under the names of a checkpoint, for networks that are functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from mithril import ops
from mithril.graph import UnsupportedError
from mithril.models import Layer
from mithril_hub.parts import INIT, Norm, Projection, Style, Table

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


@dataclass(frozen=True)
class Weights:
    """The layers and parameters below ``path``, created when they are used; layers have the paths of the checkpoint."""

    layer: Layer
    dtype: str
    path: str
    style: Style

    def below(self, path: str) -> Weights:
        """Return those below a further part of the path."""
        return replace(self, path=self.path + path)

    def param(self, name: str, shape: tuple[int, ...], init: str = INIT) -> Any:
        """Return a parameter."""
        return self.layer.param(self.path + name, shape, init, self.dtype)

    def linear(self, name: str, x: Any, size: int, *, bias: bool = False) -> Any:
        """Return a product with the weight of that name, and its bias."""
        inputs = x.shape[-1]
        return self._leaf(name, lambda: Projection(inputs, size, self.dtype, bias=bias))(x)

    def norm(self, name: str, x: Any) -> Any:
        """Return the norm of the last axis."""
        size = x.shape[-1]
        return self._leaf(name, lambda: Norm(size, self.style, self.dtype))(x)

    def table(self, name: str, rows: int, size: int) -> Layer:
        """Return an embedding."""
        return self._leaf(name, lambda: Table(rows, size, self.dtype))

    def _leaf(self, name: str, create: Callable[[], Layer]) -> Layer:
        """Return the child layer of that path, which the first trace creates; a replaced layer stays."""
        path = self.path + name
        if path not in vars(self.layer):
            setattr(self.layer, path, create())
        return getattr(self.layer, path)  # type: ignore[no-any-return]
