"""Recurrent layers whose states are images: ``ConvLSTM``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mithril import ops
from mithril_keras.layers.activations import activation_function
from mithril_keras.layers.convolution import padding_of, same_padding
from mithril_keras.layers.recurrent import Run, check_recurrent, run_cell
from mithril_keras.table import layer
from mithril_keras.tensor import Tensor, pair
from mithril_keras.weights import Weights


class _ConvLSTM:
    """Convolutions in place of the products of an LSTM; inputs and states have the channels first."""

    def __init__(self, weights: Weights, channels: Any, filters: int, kernel: tuple[int, ...], settings: Any) -> None:
        count = len(kernel)
        perm = (count + 1, count, *range(count))
        self.weights, self.filters, self.kernel = weights, filters, kernel
        self.stride, self.dilation, self.padding, activation, recurrent, use_bias = settings
        self.activation = activation_function(activation, weights.label)
        self.recurrent_activation = activation_function(recurrent, weights.label)
        self.w = weights.param("kernel", (*kernel, channels, 4 * filters), perm=perm)
        self.recurrent = weights.param("recurrent_kernel", (*kernel, filters, 4 * filters), perm=perm)
        self.bias = weights.param("bias", (4 * filters,)) if use_bias else None

    def project(self, steps: Any) -> Any:
        length, batch, *rest = steps.shape
        x = ops.reshape(steps, shape=(length * batch, *rest))
        pads = padding_of(self.weights, self.padding, x, self.kernel, self.stride, self.dilation)
        y = ops.conv(x, self.w, stride=self.stride, padding=pads, dilation=self.dilation)
        if self.bias is not None:
            y = y + ops.reshape(self.bias, shape=(4 * self.filters, *(1,) * len(self.kernel)))
        return ops.reshape(y, shape=(length, batch, *y.shape[1:]))

    def step(self, x: Any, states: tuple[Any, ...]) -> tuple[Any, ...]:
        ones = (1,) * len(self.kernel)
        pads = same_padding(self.weights, x.shape[2:], self.kernel, ones, ones)
        gates = x + ops.conv(states[0], self.recurrent, stride=ones, padding=pads)
        i, f, c, o = ops.split(gates, sizes=(self.filters,) * 4, axis=1)
        cell = self.recurrent_activation(f) * states[1] + self.recurrent_activation(i) * self.activation(c)
        return self.recurrent_activation(o) * self.activation(cell), cell


@layer("ConvLSTM1D", "ConvLSTM2D", "ConvLSTM3D", masks="own")
def conv_lstm(
    weights: Weights,
    x: Tensor,
    initial_state: Any = None,
    *,
    filters: int,
    kernel_size: Sequence[int],
    strides: Any = 1,
    padding: str = "valid",
    data_format: str | None = None,
    dilation_rate: Any = 1,
    activation: Any = "tanh",
    recurrent_activation: Any = "sigmoid",
    use_bias: bool = True,
    dropout: float = 0.0,
    recurrent_dropout: float = 0.0,
    return_sequences: bool = False,
    return_state: bool = False,
    go_backwards: bool = False,
    stateful: bool = False,
    zero_output_for_mask: bool = False,
    mask: Any = None,
) -> Any:
    """Return convolutional long short-term memory."""
    check_recurrent(weights, stateful, max(dropout, recurrent_dropout))
    count = x.rank - 3
    kernel, is_last = pair(kernel_size, count), data_format != "channels_first"
    to_first, to_last = (0, 1, count + 2, *range(2, count + 2)), (0, 1, *range(3, count + 3), 2)
    v = ops.transpose(x.value, perm=to_first) if is_last else x.value
    settings = (pair(strides, count), pair(dilation_rate, count), padding, activation, recurrent_activation, use_bias)
    cell = _ConvLSTM(weights.below("cell", ""), v.shape[2], filters, kernel, settings)
    if initial_state is not None and is_last:
        initial_state = [Tensor(s.first) for s in initial_state]
    run = Run(return_sequences, return_state, go_backwards, zero_output_for_mask, dropout)
    results = run_cell(weights, run, Tensor(v, mask=x.mask), initial_state, mask, None, 2, cell)
    listed = results if isinstance(results, list) else [results]
    if is_last:
        sequence = listed[0] if return_sequences else None
        listed = [Tensor(first=y.value, mask=y.mask) for y in listed]
        if sequence is not None:
            listed[0] = Tensor(ops.transpose(sequence.value, perm=to_last), mask=sequence.mask)
    return listed if len(listed) > 1 else listed[0]
