"""Normalization: batch, layer, RMS, group and instance norm, with PyTorch's names for parameters and statistics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mithril import ops
from mithril.graph import ModelError, ShapeError, Value, is_static, numel, product
from mithril.models.language.arguments import expect_rank, expect_size, positive
from mithril.models.language.layer import Layer


class _BatchNorm(Layer):
    ranks: tuple[int, ...] = ()
    layout = ""
    weights = ("weight", "bias")

    def __init__(
        self, features: int | None = None, *, eps: float = 1e-5, momentum: float = 0.1, affine: bool = True
    ) -> None:
        self.features = None if features is None else positive(type(self).__name__, "features", features)
        self.eps = eps
        self.momentum = momentum
        self.affine = affine

    def expects(self, terminal: str) -> Any:
        return ((None, self.features, *(None,) * (self.ranks[0] - 2)), None) if terminal == "input" else None

    def build(self, x: Value) -> Any:
        expect_rank(x, *self.ranks, layout=self.layout)
        shape = (expect_size(x, 1, self.features, "channels"),)
        if self.affine:
            scale, bias = self.param("weight", shape, "ones"), self.param("bias", shape, "zeros")
        else:
            scale, bias = (ops.full(shape=shape, value=v, dtype=x.dtype) for v in (1.0, 0.0))
        mean, var = self.state("running_mean", shape, "zeros"), self.state("running_var", shape, "ones")
        if not self.training:
            return ops.batch_norm(x, scale, bias, mean, var, eps=self.eps)
        y, batch_mean, batch_var = ops.batch_norm_training(x, scale, bias, eps=self.eps)
        self.update_state("running_mean", self._running_average(mean, batch_mean))
        self.update_state("running_var", self._running_average(var, batch_var * _unbiased(x)))
        return y

    def _running_average(self, old: Value, new: Any) -> Any:
        return ops.cast(old * (1.0 - self.momentum) + new * self.momentum, dtype=old.dtype)


def _unbiased(x: Value) -> Any:
    """Return n / (n - 1) for n elements per channel: running variances are sample variances."""
    sizes = [n for k, n in enumerate(x.shape) if k != 1]
    if is_static(tuple(sizes)):
        n = int(numel(tuple(sizes)))
        return n / (n - 1) if n > 1 else 1.0
    count = ops.cast(ops.size_value(value=product(sizes)), dtype="float32")
    return count / ops.maximum(count - 1.0, 1.0)


class BatchNorm1d(_BatchNorm):
    """Batch norm over the batch (and length): [N, C] or [N, C, L]."""

    ranks = (2, 3)
    layout = "[N, C] or [N, C, L]"


class BatchNorm2d(_BatchNorm):
    """Batch norm over batch, height and width: [N, C, H, W]."""

    ranks = (4,)
    layout = "[N, C, H, W]"


class BatchNorm3d(_BatchNorm):
    """Batch norm over batch, depth, height and width: [N, C, D, H, W]."""

    ranks = (5,)
    layout = "[N, C, D, H, W]"


class LayerNorm(Layer):
    """Layer norm over the last axes: ``LayerNorm(64)`` one, ``LayerNorm([8, 64])`` two, ``LayerNorm()`` of any size.

    ``scale`` and ``bias`` select its parameters; ``affine=False`` leaves out both.
    """

    weights = ("weight", "bias")

    def __init__(
        self,
        shape: int | Sequence[int] | None = None,
        *,
        eps: float = 1e-5,
        affine: bool = True,
        bias: bool = True,
        scale: bool = True,
    ) -> None:
        self.scale = scale
        self.shape = (shape,) if isinstance(shape, int) else None if shape is None else tuple(shape)
        self.eps = eps
        self.affine = affine
        self.bias = bias

    def build(self, x: Value) -> Any:
        count = 1 if self.shape is None else len(self.shape)
        axes = tuple(range(-count, 0))
        expected: Sequence[int | None] = (None,) if self.shape is None else self.shape
        shape = tuple(expect_size(x, axis, size, "features") for axis, size in zip(axes, expected, strict=True))
        scale = self.param("weight", shape, "ones") if self.affine and self.scale else None
        bias = self.param("bias", shape, "zeros") if self.affine and self.bias else None
        return ops.layer_norm(x, scale, bias, axes=axes, eps=self.eps)


class RMSNorm(Layer):
    """Division by the root mean square over the last axis."""

    weights = ("weight",)

    def __init__(self, features: int | None = None, *, eps: float = 1e-6, affine: bool = True) -> None:
        self.features = features
        self.eps = eps
        self.affine = affine

    def build(self, x: Value) -> Any:
        size = expect_size(x, -1, self.features, "features")
        scale = self.param("weight", (size,), "ones") if self.affine else None
        return ops.rms_norm(x, scale, eps=self.eps)


class GroupNorm(Layer):
    """Norm over groups of channels: ``GroupNorm(groups=8)`` or, as in PyTorch, ``GroupNorm(8, 64)``."""

    weights = ("weight", "bias")

    def __init__(self, groups: int, channels: int | None = None, *, eps: float = 1e-5, affine: bool = True) -> None:
        self.groups = positive("GroupNorm", "groups", groups)
        self.channels = channels
        self.eps = eps
        self.affine = affine
        if channels is not None and channels % groups:
            raise ModelError(f"GroupNorm: groups={groups} does not divide the {channels} channels")

    def build(self, x: Value) -> Any:
        channels = expect_size(x, 1, self.channels, "channels")
        if isinstance(channels, int) and channels % self.groups:
            raise ShapeError(f"groups={self.groups} does not divide the {channels} channels", facts=[f"input {x.type}"])
        scale = self.param("weight", (channels,), "ones") if self.affine else None
        bias = self.param("bias", (channels,), "zeros") if self.affine else None
        return ops.group_norm(x, scale, bias, groups=self.groups, eps=self.eps)


class _InstanceNorm(Layer):
    rank = 0
    layout = ""
    weights = ("weight", "bias")

    def __init__(self, channels: int | None = None, *, eps: float = 1e-5, affine: bool = False) -> None:
        self.channels = channels
        self.eps = eps
        self.affine = affine

    def build(self, x: Value) -> Any:
        expect_rank(x, self.rank, layout=self.layout)
        channels = expect_size(x, 1, self.channels, "channels")
        scale = self.param("weight", (channels,), "ones") if self.affine else None
        bias = self.param("bias", (channels,), "zeros") if self.affine else None
        return ops.instance_norm(x, scale, bias, eps=self.eps)


class InstanceNorm1d(_InstanceNorm):
    """Norm over the length of each sample and channel: [N, C, L]."""

    rank, layout = 3, "[N, C, L]"


class InstanceNorm2d(_InstanceNorm):
    """Norm over height and width of each sample and channel: [N, C, H, W]."""

    rank, layout = 4, "[N, C, H, W]"
