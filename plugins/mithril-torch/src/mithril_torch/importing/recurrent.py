"""Recurrent ATen operators, as scans over time; the products with the inputs are one for all steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mithril import ops
from mithril.graph import UnsupportedError
from mithril_importing.arrays import as_value
from mithril_torch.importing.table import row

# Projected input, states, weight, bias, of an LSTM with proj_size the weight of the projection -> states.
Step = Callable[..., tuple[Any, ...]]


def _lstm(projected: Any, states: tuple[Any, ...], weight: Any, bias: Any, projection: Any = None) -> tuple[Any, ...]:
    h, c = states
    gates = ops.split(ops.add(projected, ops.linear(h, weight, bias)), sizes=(c.shape[-1],) * 4, axis=-1)
    i, f, o = (ops.sigmoid(gates[k]) for k in (0, 1, 3))
    c = ops.add(ops.mul(f, c), ops.mul(i, ops.tanh(gates[2])))
    h = ops.mul(o, ops.tanh(c))
    return h if projection is None else ops.linear(h, projection), c


def _gru(projected: Any, states: tuple[Any, ...], weight: Any, bias: Any) -> tuple[Any, ...]:
    (h,) = states
    sizes = (h.shape[-1],) * 3
    from_input = ops.split(projected, sizes=sizes, axis=-1)
    from_state = ops.split(ops.linear(h, weight, bias), sizes=sizes, axis=-1)
    r, z = (ops.sigmoid(ops.add(from_input[k], from_state[k])) for k in (0, 1))
    n = ops.tanh(ops.add(from_input[2], ops.mul(r, from_state[2])))
    return (ops.add(n, ops.mul(z, ops.sub(h, n))),)


def _rnn(activation: Any) -> Step:
    def step(projected: Any, states: tuple[Any, ...], weight: Any, bias: Any) -> tuple[Any, ...]:
        return (activation(ops.add(projected, ops.linear(states[0], weight, bias))),)

    return step


def _run(
    step: Step,
    x: Any,
    states: Any,
    params: Any,
    has_biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool = False,
    *,
    layer: Any,
    valid: Any = None,
) -> tuple[Any, list[Any]]:
    """Return the outputs of the last layer and the final states, stacked by layer and direction.

    ``valid`` [steps, batch, 1] is false beyond the end of a row, whose states remain those of its last step.
    """
    if len(x.shape) != 3:
        raise UnsupportedError("a recurrent operator requires a batch axis", hint="pass x[None], or x[:, None]")
    x = ops.transpose(as_value(x), perm=(1, 0, 2)) if batch_first else as_value(x)
    directions = 1 + bidirectional
    per_layer = len(params) // (layers * directions)
    finals: list[list[Any]] = []
    for k in range(layers):
        outputs = []
        for direction in range(directions):
            place = k * directions + direction
            weights = [as_value(p) for p in params[place * per_layer : (place + 1) * per_layer]]
            w_x, w_h, *biases = weights
            b_x, b_h, *projection = biases if has_biases else (None, None, *biases)
            projected = ops.linear(x, w_x, b_x)
            carry = tuple(as_value(s)[place] for s in states)

            def body(carry: Any, xs: Any, w: Any = w_h, b: Any = b_h, projection: Any = projection) -> Any:
                now, *is_valid = xs
                after = step(now, carry, w, b, *projection)
                if is_valid:
                    after = tuple(ops.where(is_valid[0], new, old) for new, old in zip(after, carry, strict=True))
                return after, after[0]

            steps = (projected,) if valid is None else (projected, valid)
            last, ys = ops.scan(body, carry, steps, reverse=bool(direction))
            outputs.append(ys)
            finals.append(list(last))
        x = ops.concat(*outputs, axis=-1) if directions == 2 else outputs[0]
        if dropout and train and k + 1 < layers:
            x = ops.dropout(x, layer.key(), p=float(dropout))
    y = ops.transpose(x, perm=(1, 0, 2)) if batch_first else x
    return y, [ops.stack(*states_of, axis=0) for states_of in zip(*finals, strict=True)]


def _recurrent(step: Step) -> Callable[..., tuple[Any, ...]]:
    def run(x: Any, states: Any, params: Any, *settings: Any, layer: Any) -> tuple[Any, ...]:
        y, finals = _run(step, x, states, params, *settings, layer=layer)
        return (y, *finals)

    return run


# -- packed sequences: rows [steps * batch, features] and lengths --------------------------------------------------
def _rows(data: Any, lengths: Any) -> Any:
    """Return [steps, batch, features]."""
    return ops.reshape(as_value(data), shape=(-1, lengths.shape[0], *data.shape[1:]))


def _valid(steps: Any, lengths: Any) -> Any:
    """Return whether each step [steps, batch] is within the length of its row."""
    return ops.less(ops.iota(shape=(steps, 1), axis=0, dtype="int64"), ops.unsqueeze(as_value(lengths), axis=0))


def _recurrent_of_packed(step: Step) -> Callable[..., tuple[Any, ...]]:
    def run(data: Any, lengths: Any, states: Any, params: Any, *settings: Any, layer: Any) -> tuple[Any, ...]:
        x = _rows(data, lengths)
        valid = ops.unsqueeze(_valid(x.shape[0], lengths), axis=2)
        y, finals = _run(step, x, states, params, *settings, layer=layer, valid=valid)
        return (ops.reshape(y, shape=(-1, y.shape[2])), *finals)

    return run


@row("mithril::pack")
def pack(x: Any, lengths: Any, batch_first: bool) -> Any:
    x = as_value(x)
    x = ops.transpose(x, perm=(1, 0, *range(2, len(x.shape)))) if batch_first else x
    return ops.reshape(x, shape=(-1, *x.shape[2:]))


@row("mithril::unpack")
def unpack(data: Any, lengths: Any, steps: Any, batch_first: bool, padding: float) -> Any:
    y = _rows(data, lengths)
    axes = tuple(range(2, len(y.shape)))
    y = ops.where(ops.unsqueeze(_valid(steps, lengths), axis=axes), y, padding)
    return ops.transpose(y, perm=(1, 0, *axes)) if batch_first else y


for _name, _step in {"lstm": _lstm, "gru": _gru, "rnn_tanh": _rnn(ops.tanh), "rnn_relu": _rnn(ops.relu)}.items():
    row(f"mithril::{_name}")(_recurrent(_step))
    row(f"mithril::packed_{_name}")(_recurrent_of_packed(_step))


@row("mithril::ctc_loss")
def ctc_loss(
    x: Any, labels: Any, x_lengths: Any, label_lengths: Any, blank: int, reduction: int, zero_infinity: bool
) -> Any:
    """Return the loss of labels in rows; PyTorch's log probabilities have time first."""
    unbatched = len(x.shape) == 2
    if len(labels.shape) != (1 if unbatched else 2):
        raise UnsupportedError("ctc_loss of concatenated labels is not supported", hint="pass labels [batch, labels]")
    operands = [as_value(v) for v in (x, labels, x_lengths, label_lengths)]
    if unbatched:
        operands = [ops.unsqueeze(operands[0], axis=1), *(ops.unsqueeze(v, axis=0) for v in operands[1:])]
    logits, *labels_and_lengths = operands
    kind = ("none", "mean", "sum")[reduction]
    logits = ops.transpose(logits, perm=(1, 0, 2))
    y = ops.ctc_loss(logits, *labels_and_lengths, blank=blank, reduction=kind, zero_infinity=zero_infinity)
    return ops.squeeze(y, axis=0) if unbatched and kind == "none" else y
