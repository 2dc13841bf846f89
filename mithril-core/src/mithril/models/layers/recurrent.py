"""Recurrent layers: RNN, GRU and LSTM, stacked and bidirectional, with PyTorch's names and gate order.

Inputs are [batch, length, features] (``batch_first=False``: [length, batch, features]).
"""

from __future__ import annotations

from typing import Any

from mithril import ops
from mithril.base import ModelError
from mithril.ir import Value
from mithril.models.language.arguments import expect_rank, expect_size, positive, probability
from mithril.models.language.layer import Layer


class _Recurrent(Layer):
    gates = 1
    states: tuple[str, ...] = ("hidden",)

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
        if not 1 <= len(sizes) <= 2:
            raise ModelError(f"{title} takes one size, or input and output size; got {len(sizes)} sizes")
        for size in sizes:
            positive(title, "size", size)
        self.in_size, self.size = (sizes[0] if len(sizes) == 2 else None), sizes[-1]
        self.layers = positive(title, "layers", layers)
        self.directions = 2 if bidirectional else 1
        self.bias = bias
        self.dropout = probability(title, dropout)
        self.batch_first = batch_first
        self.optional = self.states
        self.outputs = ("output", *(f"last_{name}" for name in self.states))

    def expects(self, terminal: str) -> Any:
        return ((None, None, self.in_size), None) if terminal == "input" else None

    def step(self, x: Any, state: tuple[Any, ...], recurrent: Any) -> tuple[Any, ...]:
        """Return the next state; ``x`` and ``recurrent`` are the gate inputs from the sequence and from the state."""
        raise NotImplementedError

    def build(self, x: Value, *initial: Value | None) -> Any:
        expect_rank(x, 3, layout="[batch, length, features]" if self.batch_first else "[length, batch, features]")
        expect_size(x, -1, self.in_size, "features")
        y: Any = ops.transpose(x, perm=(1, 0, 2)) if self.batch_first else x
        lasts: list[list[Any]] = [[] for _ in self.states]
        for layer in range(self.layers):
            if layer and self.dropout and self.training:
                y = ops.dropout(y, self.key(), p=self.dropout)
            sequences = []
            for direction in range(self.directions):
                start = self._start(initial, layer * self.directions + direction, y)
                sequence, last = self._run(y, start, f"l{layer}" + "_reverse" * direction, direction == 1)
                sequences.append(sequence)
                for states, value in zip(lasts, last, strict=True):
                    states.append(value)
            y = sequences[0] if len(sequences) == 1 else ops.concat(*sequences, axis=2)
        if self.batch_first:
            y = ops.transpose(y, perm=(1, 0, 2))
        return (y, *(ops.stack(*states, axis=0) for states in lasts))

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

    def _run(self, y: Any, start: tuple[Any, ...], suffix: str, reverse: bool) -> tuple[Any, tuple[Any, ...]]:
        from mithril.ops import scan

        width = self.gates * self.size
        bound = self.size**-0.5
        init = f"uniform(low={-bound}, high={bound})"
        w_in = self.param(f"weight_ih_{suffix}", (width, y.shape[2]), init)
        w_rec = self.param(f"weight_hh_{suffix}", (width, self.size), init)
        b_in = self.param(f"bias_ih_{suffix}", (width,), init) if self.bias else None
        b_rec = self.param(f"bias_hh_{suffix}", (width,), init) if self.bias else None
        gate_inputs = ops.linear(y, w_in, b_in)  # one product for all steps

        def body(carry: Any, gate_input: Any) -> tuple[Any, Any]:
            state = tuple(carry) if isinstance(carry, (tuple, list)) else (carry,)
            new_state = self.step(gate_input, state, ops.linear(state[0], w_rec, b_rec))
            return (new_state if len(new_state) > 1 else new_state[0]), new_state[0]

        last, sequence = scan(body, start if len(start) > 1 else start[0], gate_inputs, reverse=reverse)
        return sequence, tuple(last) if isinstance(last, (tuple, list)) else (last,)


def _gates(x: Any, count: int, size: int) -> list[Any]:
    return list(ops.split(x, sizes=(size,) * count, axis=1))


class RNN(_Recurrent):
    """``h' = tanh(W x + U h)``: ``RNN(64)`` or ``RNN(in, 64)``."""

    def step(self, x: Any, state: tuple[Any, ...], recurrent: Any) -> tuple[Any, ...]:
        return (ops.tanh(x + recurrent),)


class GRU(_Recurrent):
    """Gated recurrent unit; the gates are reset, update, new."""

    gates = 3

    def step(self, x: Any, state: tuple[Any, ...], recurrent: Any) -> tuple[Any, ...]:
        xr, xz, xn = _gates(x, 3, self.size)
        hr, hz, hn = _gates(recurrent, 3, self.size)
        update = ops.sigmoid(xz + hz)
        new = ops.tanh(xn + ops.sigmoid(xr + hr) * hn)
        return (new + update * (state[0] - new),)


class LSTM(_Recurrent):
    """Long short-term memory; the gates are input, forget, cell, output."""

    gates = 4
    states = ("hidden", "cell")

    def step(self, x: Any, state: tuple[Any, ...], recurrent: Any) -> tuple[Any, ...]:
        i, f, g, o = _gates(x + recurrent, 4, self.size)
        cell = ops.sigmoid(f) * state[1] + ops.sigmoid(i) * ops.tanh(g)
        return ops.sigmoid(o) * ops.tanh(cell), cell
