"""RNN, GRU and LSTM as scans over the steps."""

from __future__ import annotations

from mithril import ops
from mithril.graph import OperationError, UnsupportedError
from mithril_onnx.operators.common import scalar
from mithril_onnx.table import Weight, operator

PLAIN = {
    "sigmoid": lambda x, a, b: ops.sigmoid(x),
    "tanh": lambda x, a, b: ops.tanh(x),
    "relu": lambda x, a, b: ops.relu(x),
    "affine": lambda x, a, b: x * (1.0 if a is None else a) + (0.0 if b is None else b),
    "leakyrelu": lambda x, a, b: ops.leaky_relu(x, slope=0.01 if a is None else a),
    "hardsigmoid": lambda x, a, b: ops.clip(
        x * (0.2 if a is None else a) + (0.5 if b is None else b), low=0.0, high=1.0
    ),
    "scaledtanh": lambda x, a, b: ops.tanh(x * (1.0 if b is None else b)) * (1.0 if a is None else a),
    "elu": lambda x, a, b: ops.elu(x, alpha=1.0 if a is None else a),
    "softsign": lambda x, a, b: ops.softsign(x),
    "softplus": lambda x, a, b: ops.softplus(x),
}


class Cell:
    """Common parts of the three operators: activations per direction, directions, lengths, layout."""

    def __init__(self, names, defaults, directions, alphas, betas, limit):
        per = len(defaults)
        names = tuple(n.lower() for n in names) if names else defaults * directions
        if len(names) != per * directions:
            raise OperationError(f"{len(names)} activations for {directions} directions of {per}")
        alpha, beta = list(alphas or ()), list(betas or ())
        self.functions = []
        for name in names:
            if name not in PLAIN:
                raise UnsupportedError(f"the activation '{name}' of a recurrent operator is not supported")
            takes_a = name in ("affine", "leakyrelu", "hardsigmoid", "scaledtanh", "elu", "thresholdedrelu")
            takes_b = name in ("affine", "hardsigmoid", "scaledtanh")
            a = alpha.pop(0) if takes_a and alpha else None
            b = beta.pop(0) if takes_b and beta else None
            self.functions.append(self._clipped(PLAIN[name], a, b, limit))
        self.per = per

    @staticmethod
    def _clipped(function, a, b, limit):
        if limit is None:
            return lambda x: function(x, a, b)
        return lambda x: function(ops.clip(x, low=-limit, high=limit), a, b)

    def of(self, direction):
        return self.functions[direction * self.per : (direction + 1) * self.per]


def run(x, weights, lengths, states, project, step, direction, layout):
    """Scan each direction; return all hidden states and the last ones.

    ``project(x, weights)`` is the part of the gates that reads the inputs, of all steps at once, and
    ``step(direction, part, states, weights)`` returns the next states. x is [time, batch, size], states are
    [directions, batch, hidden].
    """
    if layout:
        x = ops.transpose(x, perm=(1, 0, 2))
        states = [None if s is None else ops.transpose(s, perm=(1, 0, 2)) for s in states]
    time, batch = x.shape[:2]
    hidden = weights[1].shape[2]
    directions = weights[0].shape[0]
    outputs, last = [], []
    for k in range(directions):
        backward = direction == "reverse" or (direction == "bidirectional" and k == 1)
        direction_weights = [None if w is None else ops.select(w, index=(k,), axes=(0,)) for w in weights]
        projected = project(x, direction_weights)
        first = tuple(_first(s, k, (batch, hidden), x.dtype) for s in states)

        def body(carry, element, k=k, weights_k=direction_weights):
            current, trip = element
            new = step(k, current, carry, weights_k)
            if lengths is None:
                return new, new[0]
            live = ops.unsqueeze(ops.less(ops.cast(trip, dtype=lengths.dtype), lengths), axis=(1,))
            next_carry = tuple(ops.where(live, n, o) for n, o in zip(new, carry, strict=True))
            return next_carry, ops.where(live, new[0], scalar(0.0, new[0]))

        final, rows = ops.scan(body, first, (projected, ops.iota(shape=(time,))), reverse=backward)
        outputs.append(rows)
        last.append(final)
    y = ops.stack(*outputs, axis=1)  # [time, directions, batch, hidden]
    finals = [ops.stack(*[f[j] for f in last], axis=0) for j in range(len(states))]
    if layout:
        y = ops.transpose(y, perm=(2, 0, 1, 3))
        finals = [ops.transpose(f, perm=(1, 0, 2)) for f in finals]
    return (y, *finals)


def _first(state, k, shape, dtype):
    """Return the first state of a direction: zeros, or the operand, whose batch becomes that of the inputs."""
    if state is None:
        return ops.full(shape=shape, value=0.0, dtype=dtype)
    selected = ops.select(state, index=(k,), axes=(0,))
    return selected if selected.shape == shape else ops.broadcast_to(selected, shape=shape)


def _parts(v, count, axis=0):
    """Split the gates of a weight, a bias or their product."""
    size = v.shape[axis] // count
    return ops.split(v, sizes=(size,) * count, axis=axis)


def _project(x, weights):
    """Return the products of all inputs and both biases."""
    z = ops.linear(x, weights[0])
    if weights[2] is None:
        return z
    left, right = _parts(weights[2], 2)
    return z + (left + right)


def _directions(direction):
    return 2 if direction == "bidirectional" else 1


@operator
def RNN(
    x, w: Weight, r: Weight, b: Weight = None, sequence_lens=None, initial_h=None, *,
    activation_alpha=None, activation_beta=None, activations=None, clip=None, direction="forward", hidden_size=None,
    layout=0,
):  # fmt: skip
    cell = Cell(activations, ("tanh",), _directions(direction), activation_alpha, activation_beta, clip)

    def step(k, projected, states, weights):
        return (cell.of(k)[0](projected + ops.linear(states[0], weights[1])),)

    return run(x, [w, r, b], sequence_lens, [initial_h], _project, step, direction, layout)


@operator
def GRU(
    x, w: Weight, r: Weight, b: Weight = None, sequence_lens=None, initial_h=None, *,
    activation_alpha=None, activation_beta=None, activations=None, clip=None, direction="forward", hidden_size=None,
    layout=0, linear_before_reset=0,
):  # fmt: skip
    cell = Cell(activations, ("sigmoid", "tanh"), _directions(direction), activation_alpha, activation_beta, clip)

    def project(x, weights):
        kernel, _, bias = weights
        z = ops.linear(x, kernel)
        if bias is None:
            return z
        if not linear_before_reset:
            return _project(x, weights)
        # The last bias of the candidate is multiplied by the reset gate, so that it belongs to the
        # step.
        wz, wr, wh, bz, br, _ = _parts(bias, 6)
        return z + ops.concat(wz + bz, wr + br, wh, axis=0)

    def step(k, projected, states, weights):
        _, recurrent, bias = weights
        gate, candidate = cell.of(k)
        (h,) = states
        xz, xr, xh = _parts(projected, 3, axis=1)
        if linear_before_reset:
            hz, hr, hh = _parts(ops.linear(h, recurrent), 3, axis=1)
            update, reset = gate(xz + hz), gate(xr + hr)
            new = candidate(xh + reset * (hh if bias is None else hh + _parts(bias, 6)[5]))
        else:
            size = recurrent.shape[1]
            gates, inner = ops.split(recurrent, sizes=(2 * size, size), axis=0)
            hz, hr = _parts(ops.linear(h, gates), 2, axis=1)
            update, reset = gate(xz + hz), gate(xr + hr)
            new = candidate(xh + ops.linear(reset * h, inner))
        return ((1.0 - update) * new + update * h,)

    return run(x, [w, r, b], sequence_lens, [initial_h], project, step, direction, layout)


@operator
def LSTM(
    x, w: Weight, r: Weight, b: Weight = None, sequence_lens=None, initial_h=None, initial_c=None, p: Weight = None, *,
    activation_alpha=None, activation_beta=None, activations=None, clip=None, direction="forward", hidden_size=None,
    input_forget=0, layout=0,
):  # fmt: skip
    defaults = ("sigmoid", "tanh", "tanh")
    cell = Cell(activations, defaults, _directions(direction), activation_alpha, activation_beta, clip)

    def step(k, projected, states, weights):
        _, recurrent, _, peephole = weights
        gate, candidate, output = cell.of(k)
        h, c = states
        # The standard's order of gates: input, output, forget, cell.
        zi, zo, zf, zc = _parts(projected + ops.linear(h, recurrent), 4, axis=1)
        pi, po, pf = (None,) * 3 if peephole is None else _parts(peephole, 3)
        i = gate(zi if pi is None else zi + pi * c)
        f = 1.0 - i if input_forget else gate(zf if pf is None else zf + pf * c)
        new = f * c + i * candidate(zc)
        o = gate(zo if po is None else zo + po * new)
        return o * output(new), new

    return run(x, [w, r, b, p], sequence_lens, [initial_h, initial_c], _project, step, direction, layout)
