"""Pooling over windows, to a fixed output size, and over all positions."""

from __future__ import annotations

from typing import Any

from mithril import ops
from mithril.graph import Value
from mithril.models.language.arguments import paddings, per_axis
from mithril.models.language.layer import Layer
from mithril.models.layers.convolution import or_one_image


class _MaxPool(Layer):
    rank = 0

    def __init__(self, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1) -> None:
        title = type(self).__name__
        self.kernel = per_axis(title, "kernel_size", kernel_size, self.rank)
        self.stride = self.kernel if stride is None else per_axis(title, "stride", stride, self.rank)
        self.dilation = per_axis(title, "dilation", dilation, self.rank)
        self.padding = paddings(title, padding, self.kernel, self.dilation)

    @or_one_image
    def build(self, x: Value) -> Any:
        return ops.max_pool(x, kernel=self.kernel, stride=self.stride, padding=self.padding, dilation=self.dilation)


class MaxPool1d(_MaxPool):
    """The maximum of each window of [N, C, L]; the default stride is the kernel size."""

    rank = 1


class MaxPool2d(_MaxPool):
    """The maximum of each window of [N, C, H, W]; the default stride is the kernel size."""

    rank = 2


class MaxPool3d(_MaxPool):
    """The maximum of each window of [N, C, D, H, W]; the default stride is the kernel size."""

    rank = 3


class _AvgPool(Layer):
    rank = 0

    def __init__(self, kernel_size: Any, stride: Any = None, padding: Any = 0, count_include_pad: bool = True) -> None:
        title = type(self).__name__
        self.kernel = per_axis(title, "kernel_size", kernel_size, self.rank)
        self.stride = self.kernel if stride is None else per_axis(title, "stride", stride, self.rank)
        self.padding = paddings(title, padding, self.kernel, (1,) * self.rank)
        self.count_include_pad = count_include_pad

    @or_one_image
    def build(self, x: Value) -> Any:
        return ops.avg_pool(
            x,
            kernel=self.kernel,
            stride=self.stride,
            padding=self.padding,
            count_include_pad=self.count_include_pad,
        )


class AvgPool1d(_AvgPool):
    """The mean of each window of [N, C, L]."""

    rank = 1


class AvgPool2d(_AvgPool):
    """The mean of each window of [N, C, H, W]."""

    rank = 2


class AvgPool3d(_AvgPool):
    """The mean of each window of [N, C, D, H, W]."""

    rank = 3


class _AdaptivePool(Layer):
    rank = 0
    op_name = ""

    def __init__(self, size: Any) -> None:
        self.size = per_axis(type(self).__name__, "size", size, self.rank)

    @or_one_image
    def build(self, x: Value) -> Any:
        return getattr(ops, self.op_name)(x, size=self.size)


class AdaptiveAvgPool1d(_AdaptivePool):
    """Means over windows that yield the output size ``size``."""

    rank, op_name = 1, "adaptive_avg_pool"


class AdaptiveAvgPool2d(_AdaptivePool):
    """Means over windows that yield the output size ``size``."""

    rank, op_name = 2, "adaptive_avg_pool"


class AdaptiveMaxPool1d(_AdaptivePool):
    """Maxima over windows that yield the output size ``size``."""

    rank, op_name = 1, "adaptive_max_pool"


class AdaptiveMaxPool2d(_AdaptivePool):
    """Maxima over windows that yield the output size ``size``."""

    rank, op_name = 2, "adaptive_max_pool"


class _GlobalPool(Layer):
    rank = 0
    op_name = ""

    @or_one_image
    def build(self, x: Value) -> Any:
        pooled = getattr(ops, self.op_name)(x)
        return ops.reshape(pooled, shape=x.shape[:2])


class GlobalAvgPool1d(_GlobalPool):
    """The mean per channel: [N, C, L] to [N, C]."""

    rank, op_name = 1, "global_avg_pool"


class GlobalAvgPool2d(_GlobalPool):
    """The mean per channel: [N, C, H, W] to [N, C]."""

    rank, op_name = 2, "global_avg_pool"


class GlobalMaxPool1d(_GlobalPool):
    """The maximum per channel: [N, C, L] to [N, C]."""

    rank, op_name = 1, "global_max_pool"


class GlobalMaxPool2d(_GlobalPool):
    """The maximum per channel: [N, C, H, W] to [N, C]."""

    rank, op_name = 2, "global_max_pool"
