"""Recurrent layers: RNN, GRU and LSTM, stacked and bidirectional, with PyTorch's names and gate order.

Inputs are [batch, length, features] (``batch_first=False``: [length, batch, features]). With the input ``lengths``
[batch], rows may have different lengths: outputs beyond the length of a row are 0, and last states are those of its
last step.
"""

from __future__ import annotations

from typing import Any

from mithril import ops
from mithril.graph import DTypeError, ModelError, ShapeError, Value, assume
from mithril.models.language.arguments import expect_rank, expect_size, positive, probability
from mithril.models.language.layer import Layer


def _split_gates(x: Any, count: int, size: int) -> list[Any]:
    return list(ops.split(x, sizes=(size,) * count, axis=-1))


def _initializer(size: int) -> str:
    return f"uniform(low={-(size**-0.5)}, high={size**-0.5})"


def _sizes(title: str, sizes: tuple[int, ...]) -> tuple[int | None, int]:
    """Return the input size, None if unknown, and the size of the state."""
    if not 1 <= len(sizes) <= 2:
        raise ModelError(f"{title} takes one size, or input and output size; got {len(sizes)} sizes")
    for size in sizes:
        positive(title, "size", size)
    return (sizes[0] if len(sizes) == 2 else None), sizes[-1]


class _Gates:
    """The equations of one step; subclasses are layers of a step or of a sequence."""

    gates = 1
    states: tuple[str, ...] = ("hidden",)
    size: int

    def step(self, x: Any, state: tuple[Any, ...], recurrent: Any) -> tuple[Any, ...]:
        """Return the next state; ``x`` and ``recurrent`` are the gate inputs from the sequence and from the state."""
        raise NotImplementedError


class _SimpleGates(_Gates):
    def step(self, x: Any, state: tuple[Any, ...], recurrent: Any) -> tuple[Any, ...]:
        return (ops.tanh(x + recurrent),)


class _GRUGates(_Gates):
    gates = 3

    def step(self, x: Any, state: tuple[Any, ...], recurrent: Any) -> tuple[Any, ...]:
        xr, xz, xn = _split_gates(x, 3, self.size)
        hr, hz, hn = _split_gates(recurrent, 3, self.size)
        update = ops.sigmoid(xz + hz)
        new = ops.tanh(xn + ops.sigmoid(xr + hr) * hn)
        return (new + update * (state[0] - new),)


class _LSTMGates(_Gates):
    gates = 4
    states = ("hidden", "cell")

    def step(self, x: Any, state: tuple[Any, ...], recurrent: Any) -> tuple[Any, ...]:
        i, f, g, o = _split_gates(x + recurrent, 4, self.size)
        cell = ops.sigmoid(f) * state[1] + ops.sigmoid(i) * ops.tanh(g)
        return ops.sigmoid(o) * ops.tanh(cell), cell


class _Recurrent(_Gates, Layer):
    def __init__(
        self,
        *sizes: int,
        layers: int = 1,
        bidirectional: bool = False,
        bias: bool = True,
        dropout: float = 0.0,
        batch_first: bool = True,
    ) -> None:
        title = type(self).__name__
        self.in_size, self.size = _sizes(title, sizes)
        self.layers = positive(title, "layers", layers)
        self.directions = 2 if bidirectional else 1
        self.bias = bias
        self.dropout = probability(title, dropout)
        self.batch_first = batch_first
        self.optional = (*self.states, "lengths")
        self.outputs = ("output", *(f"last_{name}" for name in self.states))

    def expects(self, terminal: str) -> Any:
        if terminal == "lengths":
            return (None,), "int32"
        return ((None, None, self.in_size), None) if terminal == "input" else None

    def build(self, x: Value, *optional: Value | None) -> Any:
        *initial, lengths = optional
        expect_rank(x, 3, layout="[batch, length, features]" if self.batch_first else "[length, batch, features]")
        expect_size(x, -1, self.in_size, "features")
        y: Any = ops.transpose(x, perm=(1, 0, 2)) if self.batch_first else x
        valid = None if lengths is None else self._valid_steps(lengths, y)
        lasts: list[list[Any]] = [[] for _ in self.states]
        for layer in range(self.layers):
            if layer and self.dropout and self.training:
                y = ops.dropout(y, self.key(), p=self.dropout)
            sequences = []
            for direction in range(self.directions):
                start = self._start(tuple(initial), layer * self.directions + direction, y)
                sequence, last = self._run(y, start, valid, f"l{layer}" + "_reverse" * direction, direction == 1)
                sequences.append(sequence)
                for states, value in zip(lasts, last, strict=True):
                    states.append(value)
            y = sequences[0] if len(sequences) == 1 else ops.concat(*sequences, axis=2)
        if self.batch_first:
            y = ops.transpose(y, perm=(1, 0, 2))
        return (y, *(ops.stack(*states, axis=0) for states in lasts))

    def _valid_steps(self, lengths: Value, y: Any) -> Any:
        """Return whether each step [length, batch, 1] is within the length of its row."""
        expect_rank(lengths, 1, layout="[batch]")
        if not lengths.dtype.is_integer:
            raise DTypeError(
                f"lengths must be integers, got {lengths.dtype}", hint="cast them: lengths.astype('int32')"
            )
        if not assume(lengths.shape[0], "==", y.shape[1], "one length per row"):
            raise ShapeError(f"'lengths' has {lengths.shape[0]} rows, the input has {y.shape[1]}")
        step = ops.iota(shape=(y.shape[0], 1, 1), axis=0, dtype="int32")
        return ops.less(step, ops.reshape(ops.cast(lengths, dtype="int32"), shape=(1, y.shape[1], 1)))

    def _start(self, initial: tuple[Value | None, ...], row: int, y: Any) -> tuple[Any, ...]:
        zeros = None
        out = []
        for state in initial:
            if state is None:
                if zeros is None:
                    zeros = ops.full(shape=(y.shape[1], self.size), value=0.0, dtype=y.dtype)
                out.append(zeros)
            else:
                expect_rank(state, 3, layout="[layers * directions, batch, size]")
                out.append(
                    ops.reshape(
                        ops.slice(state, starts=(row,), stops=(row + 1,), steps=(1,), axes=(0,)), shape=state.shape[1:]
                    )
                )
        return tuple(out)

    def _run(
        self, y: Any, start: tuple[Any, ...], valid: Any, suffix: str, reverse: bool
    ) -> tuple[Any, tuple[Any, ...]]:
        from mithril.ops import scan

        width = self.gates * self.size
        init = _initializer(self.size)
        w_in = self.param(f"weight_ih_{suffix}", (width, y.shape[2]), init)
        w_rec = self.param(f"weight_hh_{suffix}", (width, self.size), init)
        b_in = self.param(f"bias_ih_{suffix}", (width,), init) if self.bias else None
        b_rec = self.param(f"bias_hh_{suffix}", (width,), init) if self.bias else None
        gate_inputs = ops.linear(y, w_in, b_in)  # one product for all steps

        def body(carry: Any, element: tuple[Any, ...]) -> tuple[Any, Any]:
            new = self.step(element[0], carry, ops.linear(carry[0], w_rec, b_rec))
            if valid is None:
                return new, new[0]
            is_valid = element[1]  # rows that ended keep their state
            after = tuple(ops.where(is_valid, a, b) for a, b in zip(new, carry, strict=True))
            return after, ops.where(is_valid, new[0], 0.0)

        sequences = (gate_inputs,) if valid is None else (gate_inputs, valid)
        last, sequence = scan(body, start, sequences, reverse=reverse)
        return sequence, tuple(last)


class _Cell(_Gates, Layer):
    """One step of a recurrent layer on [batch, features] or [features]; missing states are 0."""

    def __init__(self, *sizes: int, bias: bool = True) -> None:
        title = type(self).__name__
        self.in_size, self.size = _sizes(title, sizes)
        self.bias = bias
        self.optional = self.states
        self.outputs = ("output",) if len(self.states) == 1 else tuple(f"next_{name}" for name in self.states)

    def expects(self, terminal: str) -> Any:
        return ((None, self.in_size), None) if terminal == "input" else None

    def build(self, x: Value, *states: Value | None) -> Any:
        expect_rank(x, 1, 2, layout="[batch, features] or [features]")
        expect_size(x, -1, self.in_size, "features")
        for name, state in zip(self.states, states, strict=True):
            if state is not None:
                expect_rank(state, x.ndim, layout="that of the input")
                expect_size(state, -1, self.size, f"elements of '{name}'")
        shape = (*x.shape[:-1], self.size)
        initial = tuple(ops.full(shape=shape, value=0.0, dtype=x.dtype) if s is None else s for s in states)
        width, init = self.gates * self.size, _initializer(self.size)
        w_in = self.param("weight_ih", (width, x.shape[-1]), init)
        w_rec = self.param("weight_hh", (width, self.size), init)
        b_in = self.param("bias_ih", (width,), init) if self.bias else None
        b_rec = self.param("bias_hh", (width,), init) if self.bias else None
        after = self.step(ops.linear(x, w_in, b_in), initial, ops.linear(initial[0], w_rec, b_rec))
        return after if len(after) > 1 else after[0]


class RNN(_SimpleGates, _Recurrent):
    """``h' = tanh(W x + U h)``: ``RNN(64)`` or ``RNN(in, 64)``."""


class GRU(_GRUGates, _Recurrent):
    """Gated recurrent unit; the gates are reset, update, new."""


class LSTM(_LSTMGates, _Recurrent):
    """Long short-term memory; the gates are input, forget, cell, output."""


class RNNCell(_SimpleGates, _Cell):
    """One step of ``RNN``: ``RNNCell(64)(input="x", hidden="h")`` on [batch, features]."""


class GRUCell(_GRUGates, _Cell):
    """One step of ``GRU``: ``GRUCell(64)(input="x", hidden="h")`` on [batch, features]."""


class LSTMCell(_LSTMGates, _Cell):
    """One step of ``LSTM``: ``LSTMCell(64)(input="x", hidden="h", cell="c")``; the outputs are the next h and c."""
