"""Convolutions in one, two and three dimensions, transposed and depthwise: channels first, PyTorch's weight layout."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from mithril import ops
from mithril.graph import ModelError, Size, Value
from mithril.models.language.arguments import (
    expect_rank,
    expect_size,
    in_and_out_or_weight,
    paddings,
    per_axis,
    positive,
    size_or_weight,
)
from mithril.models.language.layer import Layer

Build = Callable[[Any, Value], Any]


def or_one_image(build: Build) -> Build:
    """Wrap ``build`` to accept one image without a batch axis; the result then has no batch axis either."""

    @wraps(build)
    def built(layer: Any, x: Value) -> Any:
        expect_rank(x, layer.rank + 1, layer.rank + 2, layout=LAYOUT[layer.rank])
        if x.ndim == layer.rank + 2:
            return build(layer, x)
        return ops.squeeze(build(layer, ops.unsqueeze(x, axis=(0,))), axis=(0,))

    return built


LAYOUT = {1: "[N, C, L] or [C, L]", 2: "[N, C, H, W] or [C, H, W]", 3: "[N, C, D, H, W] or [C, D, H, W]"}


class _Conv(Layer):
    rank = 0
    weights = ("weight", "bias")
    axis_of_out = 0  # of the weight; the input channels have the other one of the first two axes

    def __init__(
        self,
        *channels: int | None,
        dimension: int | None = None,
        kernel_size: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
        bias: bool = True,
        init: str | None = None,
    ) -> None:
        title = type(self).__name__
        if len(channels) == 3 and kernel_size is None:
            *sizes, kernel_size = channels
            channels = tuple(sizes)
        self.in_channels, self.out_channels = in_and_out_or_weight(title, channels, dimension, "channels")
        if kernel_size is None:
            raise ModelError(f"{title} needs kernel_size", hint=f"write {title}(out, kernel_size=3)")
        self.kernel = per_axis(title, "kernel_size", kernel_size, self.rank)
        self.stride = per_axis(title, "stride", stride, self.rank)
        self.dilation = per_axis(title, "dilation", dilation, self.rank)
        self.padding = paddings(title, padding, self.kernel, self.dilation)
        self.groups = positive(title, "groups", groups)
        for side, size in (("in", self.in_channels), ("out", self.out_channels)):
            if size is not None and size % groups:
                raise ModelError(f"{title}: groups={groups} does not divide the {size} {side}-channels")
        self.bias = bias
        self.init = init

    def expects(self, terminal: str) -> Any:
        weight = self.given_shape("weight") if self.in_channels is None else None
        per_group = weight[1 - self.axis_of_out] if weight and len(weight) > 1 else None
        grouped = self.axis_of_out == 0 and per_group is not None
        channels = self.in_channels if per_group is None else per_group * (self.groups if grouped else 1)
        return ((None, channels, *(None,) * self.rank), None) if terminal == "input" else None

    def _out(self) -> Size:
        """Return the output channels, else those of the weight (of one group, for transposed convolutions)."""
        out = size_or_weight(self, self.out_channels, self.axis_of_out, "channels")
        return out * self.groups if self.out_channels is None and self.axis_of_out else out

    def _channels(self, x: Value) -> Size:
        return expect_size(x, 1, self.in_channels, "channels")

    def _fan_in(self, channels: Size) -> Size:
        for k in self.kernel:
            channels = channels * k
        return channels

    def _with_bias(self, y: Any, fan_in: Size) -> Any:
        if not self.bias:
            return y
        out = y.shape[1]
        b = self.param("bias", (out,), f"fan_in_uniform(fan_in={fan_in})")
        return ops.add(y, ops.reshape(b, shape=(1, out, *(1,) * self.rank)))

    @or_one_image
    def build(self, x: Value) -> Any:
        per_group = self._channels(x) // self.groups
        fan_in = self._fan_in(per_group)
        shape = (self._out(), per_group, *self.kernel)
        w = self.param("weight", shape, self.init or f"fan_in_uniform(fan_in={fan_in})")
        y = ops.conv(x, w, stride=self.stride, padding=self.padding, dilation=self.dilation, groups=self.groups)
        return self._with_bias(y, fan_in)


class Conv1d(_Conv):
    """``Conv1d(in, out, kernel_size=3)`` on [N, C, L]; ``Conv1d(out, kernel_size=3)`` infers the input channels."""

    rank = 1


class Conv2d(_Conv):
    """``Conv2d(in, out, kernel_size=3)`` on [N, C, H, W]; ``Conv2d(out, kernel_size=3)`` infers the input channels."""

    rank = 2


class Conv3d(_Conv):
    """``Conv3d(in, out, kernel_size=3)`` on [N, C, D, H, W]; ``Conv3d(out, kernel_size=3)`` infers input channels."""

    rank = 3


class _ConvTranspose(_Conv):
    axis_of_out = 1

    def __init__(self, *channels: int | None, output_padding: Any = 0, **options: Any) -> None:
        super().__init__(*channels, **options)
        self.output_padding = per_axis(type(self).__name__, "output_padding", output_padding, self.rank, low=0)

    @or_one_image
    def build(self, x: Value) -> Any:
        per_group = self._out() // self.groups
        fan_in = self._fan_in(per_group)  # as in PyTorch, from the second axis of the weight
        shape = (self._channels(x), per_group, *self.kernel)
        w = self.param("weight", shape, self.init or f"fan_in_uniform(fan_in={fan_in})")
        y = ops.conv_transpose(
            x,
            w,
            stride=self.stride,
            padding=self.padding,
            output_padding=self.output_padding,
            dilation=self.dilation,
            groups=self.groups,
        )
        return self._with_bias(y, fan_in)


class ConvTranspose1d(_ConvTranspose):
    """The transpose of ``Conv1d``."""

    rank = 1


class ConvTranspose2d(_ConvTranspose):
    """The transpose of ``Conv2d``: ``ConvTranspose2d(in, out, kernel_size=2, stride=2)`` doubles height and width."""

    rank = 2


class ConvTranspose3d(_ConvTranspose):
    """The transpose of ``Conv3d``."""

    rank = 3


class DepthwiseConv2d(Layer):
    """A separate convolution per channel: ``DepthwiseConv2d(kernel_size=3, multiplier=1)``."""

    rank = 2
    weights = ("weight", "bias")

    def __init__(
        self, channels: int | None = None, *, kernel_size: Any, multiplier: int = 1, bias: bool = True, **options: Any
    ) -> None:
        self.channels = channels
        self.multiplier = positive("DepthwiseConv2d", "multiplier", multiplier)
        self.stride = per_axis("DepthwiseConv2d", "stride", options.pop("stride", 1), 2)
        self.dilation = per_axis("DepthwiseConv2d", "dilation", options.pop("dilation", 1), 2)
        self.kernel = per_axis("DepthwiseConv2d", "kernel_size", kernel_size, 2)
        self.padding = paddings("DepthwiseConv2d", options.pop("padding", 0), self.kernel, self.dilation)
        self.bias = bias
        if options:
            raise ModelError(
                f"DepthwiseConv2d has no argument '{next(iter(options))}'",
                facts=["accepted: channels, kernel_size, multiplier, stride, padding, dilation, bias"],
            )

    @or_one_image
    def build(self, x: Value) -> Any:
        channels = expect_size(x, 1, self.channels, "channels")
        if not isinstance(channels, int):
            raise ModelError("DepthwiseConv2d requires a static number of channels", facts=[f"input {x.type}"])
        out = channels * self.multiplier
        init = f"fan_in_uniform(fan_in={self.kernel[0] * self.kernel[1]})"
        w = self.param("weight", (out, 1, *self.kernel), init)
        y = ops.conv(x, w, stride=self.stride, padding=self.padding, dilation=self.dilation, groups=channels)
        if self.bias:
            y = ops.add(y, ops.reshape(self.param("bias", (out,), init), shape=(1, out, 1, 1)))
        return y
