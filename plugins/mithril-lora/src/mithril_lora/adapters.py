"""LoRA and adapters: replacements that add few parameters to layers of a model, and merging LoRA into the weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from mithril import ModelError, ops
from mithril.backend import CheckedType
from mithril.models import Layer, Linear, Reparametrization, Wrapper

LORA, ADAPTER = ("*lora_a", "*lora_b"), ("*adapter_down", "*adapter_up")


@dataclass(frozen=True)
class LoRA(metaclass=CheckedType):
    """A replacement that adds a product of rank ``rank`` to a weight: ``model.replace("*.query", LoRA(rank=8))``.

    The product is scaled by ``alpha / rank`` (``alpha=None``: by 1) and starts at 0, so results do not change at
    first. ``target`` is the name of the weight; its first axis counts the outputs. ``dropout`` applies to the input of
    the product, for ``Linear`` only.
    """

    rank: int = 8
    alpha: float | None = None
    dropout: float = 0.0
    target: str = "weight"

    def __post_init__(self) -> None:
        if not isinstance(self.rank, int) or self.rank < 1:
            raise ModelError(f"LoRA: rank={self.rank!r} is not a positive integer", hint="write LoRA(rank=8)")
        if not 0.0 <= self.dropout < 1.0:
            raise ModelError(f"LoRA: dropout={self.dropout!r} is not a probability below 1")

    @property
    def scale(self) -> float:
        """The factor of the product."""
        return 1.0 if self.alpha is None else self.alpha / self.rank

    def __call__(self, layer: Layer) -> Layer:
        """Return the layer with LoRA."""
        if isinstance(layer, Linear) and self.target in ("weight", layer.weight_name):
            return LowRankLinear(layer, self)
        if self.dropout:
            raise ModelError(
                f"LoRA(dropout={self.dropout}) supports Linear layers only, got {layer!r}", hint="remove dropout"
            )
        return LowRankWeight(layer, self)


class LowRankLinear(Wrapper):
    """A linear layer plus a product of low rank; ``LoRA`` creates it."""

    def __init__(self, inner: Linear, settings: LoRA) -> None:
        super().__init__(inner)
        self.settings = settings
        self.input_major = inner.input_major
        self.names = (inner.weight_name, "lora_a", "lora_b")

    def build(self, x: Any) -> Any:
        y, settings = self.inner(x), self.settings
        a, b = self._factors(x.shape[-1], y.shape[-1])
        if settings.dropout and self.training:
            x = ops.dropout(x, self.key(), p=settings.dropout)
        return y + ops.linear(ops.linear(x, a), b) * settings.scale

    def shared(self, name: str, stored: Any) -> Any:
        if name != self.names[0]:
            return stored
        outputs, inputs = stored.shape[::-1] if self.input_major else stored.shape
        a, b = self._factors(inputs, outputs)
        product = ops.cast(ops.matmul(b, a) * self.settings.scale, dtype=stored.dtype)
        return stored + (ops.transpose(product, perm=(1, 0)) if self.input_major else product)

    def _factors(self, inputs: int, outputs: int) -> tuple[Any, Any]:
        a = self.param("lora_a", (self.settings.rank, inputs), f"fan_in_uniform(fan_in={inputs})")
        return a, self.param("lora_b", (outputs, self.settings.rank), "zeros")


class LowRankWeight(Reparametrization):
    """A layer with a matrix of low rank added to its weight, of any rank; ``LoRA`` creates it."""

    input_major = False

    def __init__(self, inner: Layer, settings: LoRA) -> None:
        super().__init__(inner, settings.target)
        self.settings = settings
        prefix = "" if settings.target == "weight" else f"{settings.target}_"  # a layer can have several matrices
        self.names = (settings.target, f"{prefix}lora_a", f"{prefix}lora_b")

    def parameter(self, stored: Any) -> Any:
        if stored.ndim < 2:
            raise ModelError(f"LoRA adds to matrices, but '{self.settings.target}' of {self.inner!r} is {stored.type}")
        rows, columns = stored.shape[0], int(np.prod(stored.shape[1:]))
        rank, (_, a_name, b_name) = self.settings.rank, self.names
        a = self.param(a_name, (rank, columns), f"fan_in_uniform(fan_in={columns})", stored.dtype)
        b = self.param(b_name, (rows, rank), "zeros", stored.dtype)
        return stored + ops.reshape(ops.matmul(b, a), shape=stored.shape) * self.settings.scale


@dataclass(frozen=True)
class Adapter(metaclass=CheckedType):
    """A replacement that adds a small network to the result of a layer: ``model.replace("*.linear2", Adapter(16))``.

    The network has one hidden layer of ``size`` units and starts at 0.
    """

    size: int
    activation: str = "relu"

    def __post_init__(self) -> None:
        if not isinstance(self.size, int) or self.size < 1:
            raise ModelError(f"Adapter: size={self.size!r} is not a positive integer", hint="write Adapter(16)")
        if self.activation not in ops.ACTIVATIONS:
            raise ModelError(
                f"Adapter: unknown activation '{self.activation}'", facts=[f"known: {', '.join(ops.ACTIVATIONS)}"]
            )

    def __call__(self, layer: Layer) -> Layer:
        """Return the layer with the adapter."""
        return Adapted(layer, self)


class Adapted(Wrapper):
    """A layer and a small network on its result; ``Adapter`` creates it."""

    def __init__(self, inner: Layer, settings: Adapter) -> None:
        super().__init__(inner)
        self.settings = settings

    def build(self, *inputs: Any) -> Any:
        y = self.inner(*inputs)
        if isinstance(y, tuple):
            raise ModelError(f"an adapter requires a layer with one output, got {self.inner!r}")
        size, width = self.settings.size, y.shape[-1]
        down = self.param("adapter_down", (size, width), f"fan_in_uniform(fan_in={width})")
        up = self.param("adapter_up", (width, size), "zeros")
        return y + ops.linear(ops.linear(y, down, activation=self.settings.activation), up)


def adapter_parameters(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of LoRA and adapters only, for example to save them."""
    return {n: x for n, x in params.items() if any(fnmatchcase(n, pattern) for pattern in (*LORA, *ADAPTER))}


def adapter_patterns(model: Layer) -> list[str]:
    """Return patterns of the parameters that LoRA and adapters add, to train only these: ``trainable=``."""
    has_lora = bool(model.find(LowRankLinear) or model.find(LowRankWeight))
    patterns = [*(LORA if has_lora else ()), *(ADAPTER if model.find(Adapted) else ())]
    if not patterns:
        raise ModelError(
            "the model has no LoRA and no adapters", facts=[repr(model)], hint="model.replace('*.query', LoRA(rank=8))"
        )
    return patterns


def merge(model: Layer, params: Mapping[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Add the products of LoRA to the weights and remove LoRA from the model, in place; return its parameters.

    ``params`` are arrays by name as NumPy can read them. Adapters cannot be merged and stay.
    """
    arrays = {name: np.asarray(x) for name, x in params.items()}
    layers = [(path, layer) for path, layer in model.walk() if isinstance(layer, LowRankLinear | LowRankWeight)]
    if not layers:
        raise ModelError("the model has no LoRA to merge", facts=[repr(model)])
    for path, layer in layers:
        names = [f"{path}.{n}" for n in layer.names]
        missing = [n for n in names if n not in arrays]
        if missing and not arrays.keys().isdisjoint(names):
            raise ModelError(
                f"parameter '{missing[0]}' is missing",
                facts=[f"parameters of '{path}'"],
                hint="pass the parameters of the model; a weight that is an input of its layer cannot be merged",
            )
        if missing:  # the layer occurs at several paths, and its parameters have the name of the first
            continue
        weight, a, b = (arrays[n] for n in names)
        product = b.astype(np.float64) @ a.astype(np.float64)
        product = (product.T if layer.input_major else product).reshape(weight.shape)
        arrays[names[0]] = (weight + product * layer.settings.scale).astype(weight.dtype)
        del arrays[names[1]], arrays[names[2]]
    for kind in (LowRankLinear, LowRankWeight):
        while model.find(kind):  # a layer has one for each of its matrices, one within the other
            model.replace(kind, _inner)
    return arrays


def _inner(layer: Layer) -> Layer:
    assert isinstance(layer, Wrapper)
    return layer.inner
