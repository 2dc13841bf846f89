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
    batch_first: bool,
    *,
    layer: Any,
) -> tuple[Any, list[Any]]:
    """Return the outputs of the last layer and the final states, stacked by layer and direction."""
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
                after = step(xs, carry, w, b, *projection)
                return after, after[0]

            last, ys = ops.scan(body, carry, projected, reverse=bool(direction))
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


row("mithril::lstm")(_recurrent(_lstm))
row("mithril::gru")(_recurrent(_gru))
row("mithril::rnn_tanh")(_recurrent(_rnn(ops.tanh)))
row("mithril::rnn_relu")(_recurrent(_rnn(ops.relu)))


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
