"""Recurrent operators, as a scan over the steps. Their states begin with zeros in each call."""

from __future__ import annotations

from mithril import ops
from mithril.graph import UnsupportedError
from mithril_tflite.operators.activations import activated
from mithril_tflite.table import Stored, Weight, operator


@operator
def UNIDIRECTIONAL_SEQUENCE_RNN(
    x, weight: Weight, recurrent_weight: Weight, bias: Weight, state: Stored = None, *, time_major, activation
):
    xs = x if time_major else ops.transpose(x, perm=(1, 0, 2))
    projected = ops.linear(xs, weight, bias)

    def step(h, row):
        y = row + ops.linear(h, recurrent_weight)
        h = activated(y, activation) if activation else y
        return h, h

    zeros = ops.zeros(shape=(xs.shape[1], weight.shape[0]), dtype=x.dtype)
    _, ys = ops.scan(step, zeros, projected)
    return ys if time_major else ops.transpose(ys, perm=(1, 0, 2))


GATES = ("input", "forget", "cell", "output")


@operator
def UNIDIRECTIONAL_SEQUENCE_LSTM(
    x,
    input_weight: Weight = None, forget_weight: Weight = None, cell_weight: Weight = None, output_weight: Weight = None,
    recurrent_input_weight: Weight = None, recurrent_forget_weight: Weight = None, recurrent_cell_weight: Weight = None,
    recurrent_output_weight: Weight = None,
    peephole_input: Weight = None, peephole_forget: Weight = None, peephole_output: Weight = None,
    input_bias: Weight = None, forget_bias: Weight = None, cell_bias: Weight = None, output_bias: Weight = None,
    projection: Weight = None, projection_bias: Weight = None, state: Stored = None, cell: Stored = None,
    norm_input: Weight = None, norm_forget: Weight = None, norm_cell: Weight = None, norm_output: Weight = None, *,
    cell_clip, proj_clip, time_major, diagonal_recurrent_tensors, activation,
):  # fmt: skip
    if diagonal_recurrent_tensors:
        raise UnsupportedError("recurrent weights of an LSTM are diagonals", facts=["accepted: matrices"])
    gates = (
        (input_weight, forget_weight, cell_weight, output_weight),
        (recurrent_input_weight, recurrent_forget_weight, recurrent_cell_weight, recurrent_output_weight),
        (peephole_input, peephole_forget, None, peephole_output),
        (input_bias, forget_bias, cell_bias, output_bias),
        (norm_input, norm_forget, norm_cell, norm_output),
    )
    by_gate = [dict(zip(GATES, values, strict=True)) for values in gates]
    lstm = Lstm(by_gate, (projection, projection_bias), (cell_clip, proj_clip), activation)
    xs = x if time_major else ops.transpose(x, perm=(1, 0, 2))
    ys = lstm.run(xs)
    return ys if time_major else ops.transpose(ys, perm=(1, 0, 2))


class Lstm:
    """The equations of an LSTM; gates that the file leaves out are None."""

    def __init__(self, by_gate, projection, clips, activation):
        self.weights, self.recurrent, self.peepholes, self.biases, self.norms = by_gate
        self.projection, self.clips, self.activation = projection, clips, activation
        self.gates = [g for g in GATES if self.weights[g] is not None]  # without an input gate it is 1 - forget

    def run(self, xs):
        units = self.weights["cell"].shape[0]
        outputs = units if self.projection[0] is None else self.projection[0].shape[0]
        batch = xs.shape[1]
        start = (ops.zeros(shape=(batch, n), dtype=xs.dtype) for n in (outputs, units))
        # The products with inputs need no state: they are one product before the scan.
        rows = tuple(
            ops.linear(xs, self.weights[g], None if self.norms[g] is not None else self.biases[g]) for g in self.gates
        )
        _, ys = ops.scan(self._step, tuple(start), rows)
        return ys

    def _step(self, carry, rows):
        h, c = carry
        sums = {g: row + ops.linear(h, self.recurrent[g]) for g, row in zip(self.gates, rows, strict=True)}
        forget = ops.sigmoid(self._gate("forget", sums, c))
        incoming = ops.sigmoid(self._gate("input", sums, c)) if "input" in sums else 1.0 - forget
        cell_clip, proj_clip = self.clips
        c = forget * c + incoming * self._activated(self._gate("cell", sums, c))
        c = ops.clip(c, low=-cell_clip, high=cell_clip) if cell_clip > 0 else c
        h = ops.sigmoid(self._gate("output", sums, c)) * self._activated(c)
        if self.projection[0] is not None:
            h = ops.linear(h, *self.projection)
            h = ops.clip(h, low=-proj_clip, high=proj_clip) if proj_clip > 0 else h
        return (h, c), h

    def _gate(self, gate, sums, c):
        y = sums[gate]
        if self.peepholes[gate] is not None:
            y = y + self.peepholes[gate] * c
        if self.norms[gate] is not None:
            y = ops.layer_norm(y, self.norms[gate], self.biases[gate], axes=(-1,), eps=1e-8)
        return y

    def _activated(self, y):
        return activated(y, self.activation) if self.activation else y
