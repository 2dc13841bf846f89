"""Recurrent layers: LSTM, GRU and simple cells, masks, and both directions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mithril import ops
from mithril_keras.config import LayerConfig, layer_config
from mithril_keras.layers.activations import activation_function
from mithril_keras.layers.wrapped import call_wrapped, wrapped_config
from mithril_keras.table import layer
from mithril_keras.tensor import Tensor
from mithril_keras.weights import Weights


@dataclass(frozen=True)
class Run:
    """How a cell runs over a sequence, as the settings of its layer say."""

    return_sequences: bool
    return_state: bool
    go_backwards: bool
    zero_output_for_mask: bool
    dropout: float


def check_recurrent(weights: Weights, stateful: bool, recurrent_dropout: float) -> None:
    """Raise UnsupportedError for states between calls, and for dropout of states in training."""
    if stateful:
        raise weights.unsupported("stateful=True", "pass initial states, and return them by return_state=True")
    if recurrent_dropout and weights.training:
        raise weights.unsupported("this dropout in training", "set recurrent_dropout=0, and dropout=0 of ConvLSTM")


def run_cell(weights: Weights, run: Run, x: Tensor, initial: Any, mask: Any, size: Any, count: int, cell: Any) -> Any:
    """Run ``cell(inputs, states)`` over the steps; ``cell.project`` is the part that reads all steps at once."""
    v = weights.cast(x.value)
    if run.dropout and weights.training:
        # Keras draws one mask for all steps of a call.
        ones = ops.full(shape=(v.shape[0], 1, v.shape[2]), value=1.0, dtype=v.dtype)
        v = v * ops.dropout(ones, weights.key(), p=run.dropout)
    time_first = (1, 0, *range(2, len(v.shape)))
    steps = cell.project(ops.transpose(v, perm=time_first))
    sizes = (size,) if size is not None else (cell.filters, *steps.shape[3:])
    states = _initial(weights, initial, count, v, sizes)
    valid = x.mask if mask is None else mask.value
    xs: Any = steps
    if valid is not None:
        xs = (steps, ops.unsqueeze(ops.transpose(valid, perm=(1, 0)), axis=tuple(time_first[2:])))

    def body(carry: Any, inputs: Any) -> tuple[Any, Any]:
        old = tuple(carry)
        if valid is None:
            new = cell.step(inputs, old[:count])
            return new, new[0]
        current, is_valid = inputs
        new = cell.step(current, old[:count])
        carried = tuple(ops.where(is_valid, n, o) for n, o in zip(new, old, strict=True))
        return carried, ops.where(is_valid, new[0], 0.0) if run.zero_output_for_mask else carried[0]

    last, sequence = ops.scan(body, states, xs, reverse=run.go_backwards)
    if run.go_backwards:
        # Keras returns the results in the order in which the steps ran.
        sequence = ops.flip(sequence, axis=0)
    if run.return_sequences:
        y = Tensor(ops.transpose(sequence, perm=time_first), mask=valid)
    elif valid is not None and run.zero_output_for_mask:
        y = Tensor(sequence[-1])
    else:
        y = Tensor(last[0])
    return [y, *(Tensor(s) for s in last)] if run.return_state else y


def _initial(weights: Weights, initial: Any, count: int, v: Any, sizes: tuple[Any, ...]) -> tuple[Any, ...]:
    if initial is None:
        zeros = ops.full(shape=(v.shape[0], *sizes), value=0.0, dtype=v.dtype)
        return (zeros,) * count
    states = list(initial) if isinstance(initial, Sequence) else [initial]
    if len(states) != count:
        raise weights.unsupported(f"{len(states)} initial states, expected {count},")
    return tuple(weights.cast(s.value) for s in states)


class _Cell:
    """The parameters of a cell: kernel [in, gates * units], recurrent kernel [units, gates * units], bias."""

    gates = 1
    states = 1

    def __init__(
        self, weights: Weights, features: Any, units: int, activation: Any, recurrent: Any, use_bias: bool
    ) -> None:
        self.units = units
        self.activation = activation_function(activation, weights.label)
        self.recurrent_activation = activation_function(recurrent, weights.label)
        width = self.gates * units
        self.kernel = weights.param("kernel", (features, width))
        self.recurrent = weights.param("recurrent_kernel", (units, width))
        self.bias: Any = weights.param("bias", self.bias_shape(width)) if use_bias else None

    def bias_shape(self, width: int) -> tuple[int, ...]:
        return (width,)

    def project(self, steps: Any) -> Any:
        y = ops.matmul(steps, self.kernel)
        return y if self.bias is None else y + self.bias

    def split(self, x: Any, count: int) -> list[Any]:
        return list(ops.split(x, sizes=(self.units,) * count, axis=-1))


class _Simple(_Cell):
    def step(self, x: Any, states: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self.activation(x + ops.matmul(states[0], self.recurrent)),)


class _LSTM(_Cell):
    """The gates are input, forget, cell, output."""

    gates = 4
    states = 2

    def step(self, x: Any, states: tuple[Any, ...]) -> tuple[Any, ...]:
        i, f, c, o = self.split(x + ops.matmul(states[0], self.recurrent), 4)
        cell = self.recurrent_activation(f) * states[1] + self.recurrent_activation(i) * self.activation(c)
        return self.recurrent_activation(o) * self.activation(cell), cell


class _GRU(_Cell):
    """The gates are update, reset, new; with ``reset_after`` the bias has a second row, for the recurrent part."""

    gates = 3

    def __init__(self, *args: Any, reset_after: bool) -> None:
        self.reset_after = reset_after
        super().__init__(*args)

    def bias_shape(self, width: int) -> tuple[int, ...]:
        return (2, width) if self.reset_after else (width,)

    def project(self, steps: Any) -> Any:
        y = ops.matmul(steps, self.kernel)
        if self.bias is None:
            return y
        return y + (self.bias[0] if self.reset_after else self.bias)

    def step(self, x: Any, states: tuple[Any, ...]) -> tuple[Any, ...]:
        (h,) = states
        xz, xr, xh = self.split(x, 3)
        if self.reset_after:
            recurrent = ops.matmul(h, self.recurrent)
            hz, hr, hh = self.split(recurrent if self.bias is None else recurrent + self.bias[1], 3)
        else:
            wz, wr, wh = self.split(self.recurrent, 3)
            hz, hr = ops.matmul(h, wz), ops.matmul(h, wr)
        update, reset = self.recurrent_activation(xz + hz), self.recurrent_activation(xr + hr)
        inner = reset * hh if self.reset_after else ops.matmul(reset * h, wh)
        new = self.activation(xh + inner)
        return (update * h + (1.0 - update) * new,)


def _cell_weights(weights: Weights, name: str) -> Weights:
    return weights.below("cell", name)


@layer("LSTM", masks="own")
def lstm(
    weights: Weights,
    x: Tensor,
    initial_state: Any = None,
    *,
    units: int,
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
    """Return long short-term memory."""
    check_recurrent(weights, stateful, recurrent_dropout)
    inner = _cell_weights(weights, "lstm_cell")
    cell = _LSTM(inner, x.shape[-1], units, activation, recurrent_activation, use_bias)
    run = Run(return_sequences, return_state, go_backwards, zero_output_for_mask, dropout)
    return run_cell(weights, run, x, initial_state, mask, units, 2, cell)


@layer("GRU", masks="own")
def gru(
    weights: Weights,
    x: Tensor,
    initial_state: Any = None,
    *,
    units: int,
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
    reset_after: bool = True,
    mask: Any = None,
) -> Any:
    """Return gated recurrent unit."""
    check_recurrent(weights, stateful, recurrent_dropout)
    inner = _cell_weights(weights, "gru_cell")
    arguments = (inner, x.shape[-1], units, activation, recurrent_activation, use_bias)
    cell = _GRU(*arguments, reset_after=reset_after)
    run = Run(return_sequences, return_state, go_backwards, zero_output_for_mask, dropout)
    return run_cell(weights, run, x, initial_state, mask, units, 1, cell)


@layer("SimpleRNN", masks="own")
def simple_rnn(
    weights: Weights,
    x: Tensor,
    initial_state: Any = None,
    *,
    units: int,
    activation: Any = "tanh",
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
    """Return a recurrent layer without gates."""
    check_recurrent(weights, stateful, recurrent_dropout)
    inner = _cell_weights(weights, "simple_rnn_cell")
    cell = _Simple(inner, x.shape[-1], units, activation, "linear", use_bias)
    run = Run(return_sequences, return_state, go_backwards, zero_output_for_mask, dropout)
    return run_cell(weights, run, x, initial_state, mask, units, 1, cell)


@layer("RNN", masks="own")
def rnn(
    weights: Weights,
    x: Tensor,
    initial_state: Any = None,
    *,
    cell: Any,
    return_sequences: bool = False,
    return_state: bool = False,
    go_backwards: bool = False,
    stateful: bool = False,
    zero_output_for_mask: bool = False,
    mask: Any = None,
) -> Any:
    """Return a recurrent layer of a cell, or of cells on top of each other, which run in sequence."""
    check_recurrent(weights, stateful, 0.0)
    outer = layer_config(cell, f"the cell of {weights.label}")
    inner = weights.below("cell", outer.name)
    is_stack = outer.class_name == "StackedRNNCells"
    values = list(outer.settings.get("cells") or ()) if is_stack else [cell]
    if is_stack and (return_state or initial_state is not None):
        raise weights.unsupported("states of a stack of cells", "use one RNN layer for each cell")
    y: Any = x
    groups: list[str] = []
    for n, value in enumerate(values):
        config = layer_config(value, f"a cell of {weights.label}")
        is_last = n == len(values) - 1
        run = Run(
            return_sequences or not is_last,
            return_state,
            go_backwards and n == 0,
            zero_output_for_mask and is_last,
            0.0,
        )
        group = CELLS.get(config.class_name, ("", _Cell))[0]
        repeated = groups.count(group)
        groups.append(group)
        cell_weights = (
            inner.below(f"cells/{group}_{repeated}" if repeated else f"cells/{group}", config.name)
            if is_stack
            else inner
        )
        y = run_cell(cell_weights, run, y, initial_state, mask, *_built_cell(cell_weights, y.shape[-1], config))
        mask = None
        # Between cells, the last step comes first.
        if go_backwards and (n == 0) != is_last and y.mask is not None:
            y = Tensor(y.value, mask=ops.flip(y.mask, axis=1))
    return y


def _built_cell(weights: Weights, features: Any, config: LayerConfig) -> tuple[int, int, _Cell]:
    """Return the units, the number of states and the cell of a configuration."""
    if config.custom is not None or config.class_name not in CELLS:
        raise weights.unsupported(f"a cell of the class {config.custom or config.class_name}")
    settings, (_, kind) = config.settings, CELLS[config.class_name]
    check_recurrent(weights, False, max(settings.get("dropout", 0.0), settings.get("recurrent_dropout", 0.0)))
    units, recurrent = settings["units"], settings.get("recurrent_activation", "linear")
    arguments = (weights, features, units, settings.get("activation"), recurrent, settings.get("use_bias", True))
    further = {"reset_after": settings.get("reset_after", True)} if kind is _GRU else {}
    return units, kind.states, kind(*arguments, **further)


CELLS: dict[str, tuple[str, Any]] = {  # by class: the group in archives, and the cell
    "LSTMCell": ("lstm_cell", _LSTM),
    "GRUCell": ("gru_cell", _GRU),
    "SimpleRNNCell": ("simple_rnn_cell", _Simple),
}


@layer("Bidirectional", masks="own")
def bidirectional(
    weights: Weights,
    x: Tensor,
    initial_state: Any = None,
    *,
    layer: Any,
    backward_layer: Any = None,
    merge_mode: str | None = "concat",
    mask: Any = None,
) -> Any:
    """Return a recurrent layer in both directions."""
    forward = wrapped_config(weights, layer)
    backward = layer if backward_layer is None else backward_layer
    if forward.is_model or forward.class_name not in ("LSTM", "GRU", "SimpleRNN"):
        raise weights.unsupported(f"a layer {forward.class_name} within both directions")
    if backward_layer is None:
        backward = _reversed(layer, forward.name)
    layer_config(backward, weights.label)
    options = {} if mask is None else {"mask": mask}
    states = list(initial_state or ())
    half = len(states) // 2
    first, second = ({"initial_state": s} if s else {} for s in (states[:half], states[half:]))
    a = call_wrapped(weights, "forward_layer", layer, x, **options, **first)
    b = call_wrapped(weights, "backward_layer", backward, x, **options, **second)
    a, b = (r if isinstance(r, list) else [r] for r in (a, b))
    y, z = a[0].value, b[0].value
    sequences = bool(forward.settings.get("return_sequences"))
    if sequences:
        z = ops.flip(z, axis=1)
    valid = x.mask if sequences else None
    merged = _merged(weights, merge_mode, y, z)
    results = [Tensor(m, mask=valid) for m in merged]
    if forward.settings.get("return_state"):
        results += [*a[1:], *b[1:]]
    return results if len(results) > 1 else results[0]


def _merged(weights: Weights, mode: str | None, y: Any, z: Any) -> list[Any]:
    if mode is None:
        return [y, z]
    if mode == "concat":
        return [ops.concat(y, z, axis=-1)]
    if mode in ("sum", "ave"):
        return [(y + z) * 0.5 if mode == "ave" else y + z]
    if mode == "mul":
        return [y * z]
    raise weights.unsupported(f"merge_mode='{mode}'")


def _reversed(value: Mapping[str, Any], name: str) -> dict[str, Any]:
    settings = dict(value["config"])
    settings["go_backwards"] = not settings.get("go_backwards", False)
    settings["name"] = f"backward_{name.removeprefix('forward_')}"
    return {**value, "config": settings}
