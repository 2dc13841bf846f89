"""The plugin of a third party, as rows use it: an operation, and lowerings of one that every backend has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import mithril as ml
from mithril.graph import broadcast, floating, registry, sample
from mithril.models import Layer

NAME, OPERATION = "acme", "acme.bend"


@ml.op(name=OPERATION, shape=broadcast, dtype=floating, promotes="float", axes="... -> ...", samples=[sample((2, 3))])
def bend(x):
    """x / (1 + x * x)."""
    return x / (1.0 + x * x)


@bend.vjp
def _(g, y, x):
    square = x * x
    return (g * (1.0 - square) / ml.ops.square(1.0 + square),)


registry._operations.pop(OPERATION)  # other tests of this process list all operations


class Bend(Layer):
    """A layer of the operation."""

    def build(self, input: Any) -> Any:
        return bend(input)


def of_numpy(x: Any) -> Any:
    return np.tanh(x)


def of_torch(x: Any) -> Any:
    return x.tanh()


def of_jax(x: Any) -> Any:
    import jax

    return jax.numpy.tanh(x)


def of_mlx(x: Any) -> Any:
    import mlx.core as mx

    return mx.tanh(x)


KERNELS = {"numpy": "numpy", "c": "numpy", "ggml": "numpy", "torch": "torch", "jax": "jax", "mlx": "mlx"}


class Plugin:
    @ml.hookimpl
    def mithril_lowerings(self, backend: str) -> Sequence[ml.Lowering]:
        return [ml.Lowering("tanh", f"crossings.third_party:of_{KERNELS[backend]}")] if backend in KERNELS else []


def add_operation() -> None:
    registry._operations[OPERATION] = bend


def add_lowerings() -> None:
    ml.plugins.register(Plugin(), NAME)


def remove_operation() -> None:
    registry._operations.pop(OPERATION, None)


def remove_lowerings() -> None:
    if any(plugin.name == NAME for plugin in ml.plugins.found()):
        ml.plugins.unregister(NAME)
