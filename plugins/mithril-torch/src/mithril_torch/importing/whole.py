"""Operators that ``torch.export`` would resolve with fixed sizes, as operators of their own while a module is exported.

Recurrent layers would become one group of nodes per step, and the CTC loss reads its lengths: both export whole.
On CPUs they call the function of PyTorch, so an exported program runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

_RECURRENT = "(Tensor x, Tensor[] states, Tensor[] params, bool biases, int layers, float dropout, bool train, "
_RECURRENT += "bool bidirectional, bool batch_first) -> Tensor[]"
_RECURRENT_NAMES = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_CTC = (
    "(Tensor x, Tensor labels, Tensor x_lengths, Tensor label_lengths, int blank, int reduction, bool zero) -> Tensor"
)

_library = torch.library.Library("mithril", "FRAGMENT")
for _name in _RECURRENT_NAMES:
    _library.define(_name + _RECURRENT)
_library.define("ctc_loss" + _CTC)


def _recurrent(
    x: Any, states: Any, params: Any, biases: bool, layers: int, dropout: float, train: bool, bidirectional: bool,
    batch_first: bool,
) -> list[torch.Tensor]:  # fmt: skip
    width = states[0].shape[-1] * (1 + bidirectional)
    return [x.new_empty((*x.shape[:-1], width)), *(s.new_empty(s.shape) for s in states)]


def _ctc_loss(
    x: Any, labels: Any, x_lengths: Any, label_lengths: Any, blank: int, reduction: int, zero: bool
) -> torch.Tensor:
    unbatched = len(x.shape) == 2
    result: torch.Tensor = x.new_empty(() if reduction or unbatched else (x.shape[1],))
    return result


def _eager(original: Any, x: Any, states: Any, params: Any, *settings: Any) -> list[torch.Tensor]:
    results: Any = original(x, states if len(states) > 1 else states[0], params, *settings)
    return list(results)


for _name in _RECURRENT_NAMES:
    _library.impl(_name, _recurrent, "Meta")
    _library.impl(_name, partial(_eager, getattr(torch._VF, _name)), "CPU")
_library.impl("ctc_loss", _ctc_loss, "Meta")
_library.impl("ctc_loss", torch.ctc_loss, "CPU")


def _replaced(name: str, original: Any) -> Any:
    operator = getattr(torch.ops.mithril, name)

    def recurrent(x: Any, states: Any, params: Any, *settings: Any) -> Any:
        single = isinstance(states, torch.Tensor)
        if single and states.dtype == torch.int64:  # packed sequences, whose second operand is their batch sizes
            return original(x, states, params, *settings)
        return tuple(operator(x, [states] if single else list(states), list(params), *settings))

    return recurrent


def _ctc(
    x: Any, labels: Any, x_lengths: Any, label_lengths: Any, blank: int = 0, reduction: int = 1, zero: bool = False
) -> Any:
    lengths = [n if isinstance(n, torch.Tensor) else torch.tensor(n) for n in (x_lengths, label_lengths)]
    return torch.ops.mithril.ctc_loss(x, labels, *lengths, blank, reduction, zero)


@contextmanager
def kept_whole() -> Iterator[None]:
    """Replace the functions of PyTorch while a module is exported."""
    replaced = [(torch._VF, name, _replaced(name, getattr(torch._VF, name))) for name in _RECURRENT_NAMES]
    replaced.append((torch, "ctc_loss", _ctc))
    originals = {(id(place), name): vars(place).get(name) for place, name, _ in replaced}
    try:
        for place, name, function in replaced:
            setattr(place, name, function)
        yield
    finally:
        for place, name, _ in replaced:
            original = originals[id(place), name]
            delattr(place, name) if original is None else setattr(place, name, original)
