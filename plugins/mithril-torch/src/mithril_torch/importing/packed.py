"""Packed sequences while a module is exported: rows of equal length and their lengths.

``pack_padded_sequence`` leaves out the steps beyond the length of each row, so sizes would depend on elements. Here the
data of a packed sequence has all steps, as rows [steps * batch, features]. Only recurrent layers and
``pad_packed_sequence`` may read it: anything else would see steps that PyTorch leaves out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from mithril.graph import UnsupportedError

UNPACK = "use pad_packed_sequence(..., total_length=x.size(1)), without batch_first x.size(0)"
NAMES = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_library = torch.library.Library("mithril", "FRAGMENT")
_library.define("pack(Tensor x, Tensor lengths, bool batch_first) -> Tensor")
_library.define("unpack(Tensor data, Tensor lengths, SymInt steps, bool batch_first, float padding) -> Tensor")
for _name in NAMES:
    _library.define(
        f"packed_{_name}(Tensor data, Tensor lengths, Tensor[] states, Tensor[] params, bool biases, int layers, "
        "float dropout, bool train, bool bidirectional) -> Tensor[]"
    )


class _Steps:
    """The length of the longest row, which no code may read: it depends on elements."""

    def __gt__(self, total_length: Any) -> bool:
        return False  # pad_packed_sequence asks whether total_length is too short; _unpacked compares it


class _BatchSizes:
    """Represents the numbers of rows per step in a ``PackedSequence``."""

    device = torch.device("cpu")

    def __init__(self, lengths: Any, steps: Any) -> None:
        self.lengths, self.steps = lengths, steps

    def __getitem__(self, step: int) -> Any:
        if step:
            raise _depends("the number of rows in a step of a packed sequence")
        return self.lengths.shape[0]

    def size(self, axis: int) -> Any:
        return _Steps()


def _depends(subject: str) -> UnsupportedError:
    return UnsupportedError(
        f"{subject} depends on elements of lengths",
        hint=UNPACK,
    )


def _packed(x: Any, lengths: Any, batch_first: bool) -> tuple[Any, Any]:
    data = torch.ops.mithril.pack(x, lengths, batch_first)
    return data, _BatchSizes(lengths, x.shape[1 if batch_first else 0])


def _unpacked(data: Any, sizes: Any, batch_first: bool, padding: float, total: Any) -> tuple[Any, Any]:
    if isinstance(total, _Steps):
        raise _depends("the length of pad_packed_sequence")
    more = total - sizes.steps
    if more < 0:
        raise UnsupportedError(
            f"pad_packed_sequence with total_length={total} of rows of {sizes.steps} steps is not supported",
            hint=f"pass total_length={sizes.steps}, and slice the result",
        )
    y = torch.ops.mithril.unpack(data, sizes.lengths, sizes.steps, batch_first, float(padding))
    if more:
        pads = (0, 0) * (y.ndim - (2 if batch_first else 1))
        y = torch.nn.functional.pad(y, (*pads, 0, more), value=float(padding))
    return y, sizes.lengths


def recurrent(name: str, data: Any, sizes: _BatchSizes, states: Any, params: Any, *settings: Any) -> tuple[Any, ...]:
    """Return the results of ``torch._VF.lstm`` and relatives for a packed sequence."""
    states = [states] if isinstance(states, torch.Tensor) else list(states)
    return tuple(getattr(torch.ops.mithril, f"packed_{name}")(data, sizes.lengths, states, list(params), *settings))


def replaced() -> list[tuple[Any, str, Any]]:
    """Return the replacements while a module is exported: places, names and functions."""
    check = torch.nn.RNNBase.check_forward_args

    def checked(self: Any, x: Any, hidden: Any, sizes: Any) -> None:
        if not isinstance(sizes, _BatchSizes):  # int() of the number of rows would fix an open size
            check(self, x, hidden, sizes)

    return [
        (torch._VF, "_pack_padded_sequence", _packed),
        (torch._VF, "_pad_packed_sequence", _unpacked),
        (torch.nn.RNNBase, "check_forward_args", checked),
    ]


def is_packed(sizes: Any) -> bool:
    return isinstance(sizes, _BatchSizes)


def require_readers(graph: torch.fx.Graph) -> None:
    """Raise UnsupportedError for an operator that reads the data of a packed sequence."""
    layers = {getattr(torch.ops.mithril, f"packed_{n}").default for n in NAMES}
    readers = {*layers, torch.ops.mithril.unpack.default}
    for node in graph.nodes:
        if node.target in layers:
            sources = [user for user in node.users if user.args[1] == 0]  # the outputs, not the last states
        else:
            sources = [node] if node.target is torch.ops.mithril.pack.default else []
        for user in (user for source in sources for user in source.users):
            if user.target not in readers:
                reader = "a result of the module" if user.op == "output" else user.target
                raise UnsupportedError(
                    f"{reader} reads the data of a packed sequence, whose size depends on elements of lengths",
                    hint=UNPACK,
                )


# -- meanings for shapes, and on CPUs -----------------------------------------------------------------------------
def _pack_meta(x: Any, lengths: Any, batch_first: bool) -> Any:
    return x.new_empty((x.shape[0] * x.shape[1], *x.shape[2:]))


def _unpack_meta(data: Any, lengths: Any, steps: Any, batch_first: bool, padding: float) -> Any:
    rows = (lengths.shape[0], steps) if batch_first else (steps, lengths.shape[0])
    return data.new_empty((*rows, *data.shape[1:]))


def _recurrent_meta(
    data: Any, lengths: Any, states: Any, params: Any, biases: bool, layers: int, dropout: float, train: bool,
    bidirectional: bool,
) -> list[torch.Tensor]:  # fmt: skip
    width = states[0].shape[-1] * (1 + bidirectional)
    return [data.new_empty((data.shape[0], width)), *(s.new_empty(s.shape) for s in states)]


def _pack(x: Any, lengths: Any, batch_first: bool) -> Any:
    return (x.transpose(0, 1) if batch_first else x).flatten(0, 1).clone()


def _unpack(data: Any, lengths: Any, steps: int, batch_first: bool, padding: float) -> Any:
    y = data.unflatten(0, (steps, len(lengths))).clone()
    y[torch.arange(steps)[:, None] >= lengths] = padding
    return y.transpose(0, 1).clone() if batch_first else y


def _recurrent(
    original: Callable[..., Any], pack: Any, unpack: Any, data: Any, lengths: Any, states: Any, *rest: Any
) -> list[torch.Tensor]:
    steps = data.shape[0] // len(lengths)
    packed, sizes = pack(data.unflatten(0, (steps, len(lengths))), lengths, False)
    y, *last = original(packed, sizes, states if len(states) > 1 else states[0], *rest)
    return [unpack(y, sizes, False, 0.0, steps)[0].flatten(0, 1), *last]


_library.impl("pack", _pack_meta, "Meta")
_library.impl("pack", _pack, "CPU")
_library.impl("unpack", _unpack_meta, "Meta")
_library.impl("unpack", _unpack, "CPU")
for _name in NAMES:
    _functions = [getattr(torch._VF, n) for n in (_name, "_pack_padded_sequence", "_pad_packed_sequence")]
    _library.impl(f"packed_{_name}", _recurrent_meta, "Meta")
    _library.impl(f"packed_{_name}", partial(_recurrent, *_functions), "CPU")
