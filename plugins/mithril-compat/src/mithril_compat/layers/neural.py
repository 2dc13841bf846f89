"""Layers of networks: linear ones, convolutions, pooling, normalization, embeddings, attention."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mithril import ModelError, ops
from mithril_compat.language.block import WEIGHT, block
from mithril_compat.language.connection import TBD
from mithril_compat.layers.elementwise import padding_pairs, sizes
from mithril_compat.lowering import fill


def linear(input: Any, weight: Any, bias: Any, dimension: Any, program: Any) -> Any:
    """Return ``input @ weight.T + bias``, with weights of the sizes that are known."""
    features = dimension or program.size_of(weight, 0) or program.size_of(bias, 0) or program.expected_size()
    if features is None and not program.is_read():
        return None
    if features is None:
        raise ModelError("the output size of Linear is unknown", hint="pass dimension=, or the shape of its weight")
    w = fill(weight, (features, input.shape[-1]))
    return ops.linear(input, w, None if bias is None else fill(bias, (features,)))


@block(options="dimension use_bias")
def Linear(dimension: Any = None, use_bias: bool = True, input: Any = TBD, weight: Any = WEIGHT, bias: Any = WEIGHT,
           *, program: Any) -> Any:  # fmt: skip
    return linear(input, weight, bias if use_bias else None, dimension, program)


@block()
def ElementWiseAffine(input: Any = TBD, weight: Any = TBD, bias: Any = TBD) -> Any:
    return input * weight + bias


def _conv(input: Any, weight: Any, bias: Any, options: dict[str, Any], rank: int, bias_shape: Any = None) -> Any:
    kernel, channels, groups = options["kernel"], options["out"], options["groups"]
    if hasattr(weight, "sized"):
        if kernel is None or channels is None:
            if weight.shape is None:
                raise ModelError("a convolution needs kernel_size and out_channels, or the shape of its weight")
            channels, kernel = weight.shape[0], weight.shape[2:]
        weight = fill(weight, (channels, input.shape[1] // groups, *sizes(kernel, rank)))
    y = ops.conv(
        input,
        weight,
        stride=sizes(options["stride"], rank),
        padding=padding_pairs(options["padding"], tuple(weight.shape[2:])),
        dilation=sizes(options["dilation"], rank),
        groups=groups,
    )
    if bias is None:
        return y
    return y + fill(bias, (1, y.shape[1], *(1,) * rank))


@block(options="kernel_size out_channels use_bias")
def Convolution1D(kernel_size: Any = None, out_channels: Any = None, stride: Any = 1, padding: Any = 0,
                  dilation: Any = 1, use_bias: bool = True, input: Any = TBD, weight: Any = WEIGHT,
                  *, bias: Any = WEIGHT) -> Any:  # fmt: skip
    options = {"kernel": kernel_size, "out": out_channels, "stride": stride, "padding": padding,
               "dilation": dilation, "groups": 1}  # fmt: skip
    return _conv(input, weight, bias if use_bias else None, options, 1)


@block(options="kernel_size out_channels use_bias")
def Convolution2D(kernel_size: Any = None, out_channels: Any = None, stride: Any = (1, 1), padding: Any = (0, 0),
                  dilation: Any = (1, 1), groups: Any = 1, use_bias: bool = True, input: Any = TBD,
                  weight: Any = WEIGHT, *, bias: Any = WEIGHT) -> Any:  # fmt: skip
    options = {"kernel": kernel_size, "out": out_channels, "stride": stride, "padding": padding,
               "dilation": dilation, "groups": groups}  # fmt: skip
    return _conv(input, weight, bias if use_bias else None, options, 2)


@block(options="use_bias")
def PrimitiveConvolution1D(use_bias: bool = True, input: Any = TBD, weight: Any = TBD, stride: Any = 1,
                           padding: Any = 0, dilation: Any = 1, *, bias: Any = None) -> Any:  # fmt: skip
    options = {"kernel": None, "out": None, "stride": stride, "padding": padding, "dilation": dilation, "groups": 1}
    return _conv(input, weight, bias if use_bias else None, options, 1)


@block(options="use_bias")
def PrimitiveConvolution2D(use_bias: bool = True, input: Any = TBD, weight: Any = TBD, stride: Any = 1,
                           padding: Any = 0, dilation: Any = 1, groups: Any = 1,
                           *, bias: Any = None) -> Any:  # fmt: skip
    options = {"kernel": None, "out": None, "stride": stride, "padding": padding, "dilation": dilation,
               "groups": groups}  # fmt: skip
    return _conv(input, weight, bias if use_bias else None, options, 2)


def _pool(kind: str, input: Any, kernel: Any, stride: Any, padding: Any, dilation: Any, rank: int) -> Any:
    window = sizes(kernel, rank)
    step = window if stride is None else sizes(stride, rank)
    pairs = padding_pairs(padding, window)
    if kind == "avg":
        if sizes(dilation, rank) != (1,) * rank:
            raise ModelError("AvgPool2D with dilation is not offered", facts=[f"dilation={dilation}"])
        return ops.avg_pool(input, kernel=window, stride=step, padding=pairs)
    return ops.max_pool(input, kernel=window, stride=step, padding=pairs, dilation=sizes(dilation, rank))


@block()
def MaxPool1D(kernel_size: Any, stride: Any = None, padding: Any = (0, 0), dilation: Any = 1, input: Any = TBD) -> Any:
    return _pool("max", input, kernel_size, stride, padding, dilation, 1)


@block()
def MaxPool2D(kernel_size: Any, stride: Any = None, padding: Any = (0, 0), dilation: Any = 1, input: Any = TBD) -> Any:
    return _pool("max", input, kernel_size, stride, padding, dilation, 2)


@block()
def AvgPool2D(kernel_size: Any, stride: Any = None, padding: Any = (0, 0), dilation: Any = 1, input: Any = TBD) -> Any:
    return _pool("avg", input, kernel_size, stride, padding, dilation, 2)


@block()
def PrimitiveMaxPool1D(input: Any = TBD, kernel_size: Any = TBD, stride: Any = None, padding: Any = 0,
                       dilation: Any = 1) -> Any:  # fmt: skip
    return _pool("max", input, kernel_size, stride, padding, dilation, 1)


@block()
def PrimitiveMaxPool2D(input: Any = TBD, kernel_size: Any = TBD, stride: Any = None, padding: Any = 0,
                       dilation: Any = 1) -> Any:  # fmt: skip
    return _pool("max", input, kernel_size, stride, padding, dilation, 2)


@block()
def PrimitiveAvgPool2D(input: Any = TBD, kernel_size: Any = TBD, stride: Any = None, padding: Any = 0,
                       dilation: Any = 1) -> Any:  # fmt: skip
    return _pool("avg", input, kernel_size, stride, padding, dilation, 2)


@block(options="use_scale use_bias")
def LayerNorm(use_scale: bool = True, use_bias: bool = True, eps: Any = 1e-5, input: Any = TBD, weight: Any = WEIGHT,
              bias: Any = WEIGHT) -> Any:  # fmt: skip
    shape = (input.shape[-1],)
    scale = fill(weight, shape) if use_scale else None
    return ops.layer_norm(input, scale, fill(bias, shape) if use_bias else None, eps=float(eps))


@block(options="num_groups use_scale use_bias")
def GroupNorm(num_groups: Any = 32, use_scale: bool = True, use_bias: bool = True, eps: Any = 1e-5, input: Any = TBD,
              *, weight: Any = WEIGHT, bias: Any = WEIGHT) -> Any:  # fmt: skip
    channels = input.shape[1]
    shape = (1, channels, 1, 1)
    y = ops.group_norm(input, groups=num_groups, eps=float(eps))
    y = y * fill(weight, shape) if use_scale else y
    return y + fill(bias, shape) if use_bias else y


@block(options="num_features use_scale use_bias momentum inference", statistics="running_mean running_var")
def BatchNorm2D(num_features: Any = None, use_scale: bool = True, use_bias: bool = True, eps: Any = 1e-5,
                momentum: Any = 0.1, inference: bool = True, *, input: Any = TBD, weight: Any = WEIGHT,
                bias: Any = WEIGHT, running_mean: Any = TBD, running_var: Any = TBD, program: Any) -> Any:  # fmt: skip
    channels = input.shape[1]
    column = (1, channels, 1, 1)
    if inference:
        mean, variance = (ops.reshape(fill(x, (channels,)), shape=column) for x in (running_mean, running_var))
    else:
        mean = ops.mean(input, axis=(0, 2, 3), keepdims=True)
        variance = ops.var(input, axis=(0, 2, 3), keepdims=True)
        count = input.shape[0] * input.shape[2] * input.shape[3]
        observed = {"running_mean": mean, "running_var": variance * (count / (count - 1))}
        for key, statistic in observed.items():
            name = program.state_name(key)
            before = program.state(name, (channels,), "zeros" if key == "running_mean" else "ones")
            program.update_state(name, before * (1.0 - momentum) + ops.reshape(statistic, shape=(channels,)) * momentum)
    y = (input - mean) / ops.sqrt(variance + float(eps))
    y = y * fill(weight, column) if use_scale else y
    return y + fill(bias, column) if use_bias else y


@block(options="num_embeddings dim", integers="input")
def Embedding(num_embeddings: Any = None, dim: Any = None, input: Any = TBD, weight: Any = WEIGHT) -> Any:
    if hasattr(weight, "sized") and weight.shape is None and None in (num_embeddings, dim):
        raise ModelError("the sizes of Embedding are unknown", hint="pass num_embeddings= and dim=")
    return ops.embedding(input, fill(weight, weight.shape if num_embeddings is None else (num_embeddings, dim)))


@block()
def PositionalEncoding(hidden_dim: Any, max_len: Any = 5000, input: Any = TBD, *, program: Any) -> Any:
    positions = np.arange(max_len)[:, None] * np.exp(np.arange(0, hidden_dim, 2) * (-math.log(10000.0) / hidden_dim))
    table = np.zeros((max_len, hidden_dim), program.float_dtype)
    table[:, 0::2], table[:, 1::2] = np.sin(positions), np.cos(positions)[:, : hidden_dim // 2]
    return input + program.context.as_value(table)[: input.shape[1]]


@block(options="use_attn_mask")
def ScaledDotProduct(is_causal: Any = True, scale: Any = None, dropout_p: Any = 0.0, use_attn_mask: bool = False,
                     query: Any = TBD, key: Any = TBD, value: Any = TBD, attn_mask: Any = None,
                     *, program: Any) -> Any:  # fmt: skip
    y = ops.attention(query, key, value, attn_mask if use_attn_mask else None, causal=bool(is_causal), scale=scale)
    if dropout_p and program.training:
        raise ModelError("ScaledDotProduct with dropout_p in training is not offered", hint="add Dropout after it")
    return y
