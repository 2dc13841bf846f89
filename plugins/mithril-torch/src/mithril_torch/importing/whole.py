"""Operators that ``torch.export`` would resolve with fixed sizes, as operators of their own while a module is exported.

Recurrent layers would become one group of nodes per step, and the CTC loss reads its lengths: both export whole.
Functions that read elements to answer in Python are replaced by functions of tensors.
On CPUs they call the function of PyTorch, so an exported program runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.overrides

from mithril_torch.importing import packed

_RECURRENT = "(Tensor x, Tensor[] states, Tensor[] params, bool biases, int layers, float dropout, bool train, "
_RECURRENT += "bool bidirectional, bool batch_first) -> Tensor[]"
_CTC = (
    "(Tensor x, Tensor labels, Tensor x_lengths, Tensor label_lengths, int blank, int reduction, bool zero) -> Tensor"
)

_library = torch.library.Library("mithril", "FRAGMENT")
for _name in packed.NAMES:
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


for _name in packed.NAMES:
    _library.impl(_name, _recurrent, "Meta")
    _library.impl(_name, partial(_eager, getattr(torch._VF, _name)), "CPU")
_library.impl("ctc_loss", _ctc_loss, "Meta")
_library.impl("ctc_loss", torch.ctc_loss, "CPU")


def _replaced(name: str) -> Any:
    operator = getattr(torch.ops.mithril, name)

    def recurrent(x: Any, states: Any, params: Any, *settings: Any) -> Any:
        single = isinstance(states, torch.Tensor)
        if packed.is_packed(states):
            return packed.recurrent(name, x, states, params, *settings)
        return tuple(operator(x, [states] if single else list(states), list(params), *settings))

    return recurrent


def _ctc(
    x: Any, labels: Any, x_lengths: Any, label_lengths: Any, blank: int = 0, reduction: int = 1, zero: bool = False
) -> Any:
    lengths = [n if isinstance(n, torch.Tensor) else torch.tensor(n) for n in (x_lengths, label_lengths)]
    return torch.ops.mithril.ctc_loss(x, labels, *lengths, blank, reduction, zero)


# -- functions that read elements in Python, as functions of tensors ----------------------------------------------
def _equal(x: torch.Tensor, y: torch.Tensor) -> Any:
    return (x == y).all() if x.shape == y.shape else False


def _allclose(x: Any, y: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> Any:
    return torch.isclose(x, y, rtol, atol, equal_nan).all()


def _cov(x: Any, *, correction: int = 1, fweights: Any = None, aweights: Any = None) -> Any:
    x = x.reshape(1, -1) if x.ndim < 2 else x
    weights = x.real.new_ones(x.shape[1])
    for factors in (fweights, aweights):
        weights = weights if factors is None else weights * factors
    total = weights.sum()
    lost = correction if aweights is None or not correction else correction * (weights * aweights).sum() / total
    x = x - (x * weights).sum(1, keepdim=True) / total
    return (torch.mm(x, (x * weights).mT.conj()) / (total - lost).clamp(min=0)).squeeze()


def _corrcoef(x: Any) -> Any:
    covariance = _cov(x)
    if not covariance.ndim:
        return covariance / covariance
    size = covariance.diagonal().real.sqrt()
    return covariance / size[:, None] / size


def _narrow(x: Any, dim: int, start: Any, length: int) -> Any:
    if not isinstance(start, torch.Tensor):
        return torch.ops.aten.narrow(x, dim, start, length)
    return x.index_select(dim, torch.where(start < 0, start + x.shape[dim], start) + torch.arange(length))


def _one_hot(x: Any, num_classes: int = -1) -> Any:
    if num_classes < 0:
        return torch.ops.aten.one_hot(x, num_classes)  # the number depends on data
    return (x.unsqueeze(-1) == torch.arange(num_classes)).long()


def _gaussian_nll_loss(
    x: Any, target: Any, var: Any, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Any:
    var = torch.as_tensor(var, dtype=x.dtype)
    var = var.unsqueeze(-1) if var.ndim and var.shape == x.shape[:-1] != x.shape else var
    limit = torch.where(var < eps, eps - var, 0).detach()
    loss = 0.5 * ((var + limit).log() + (x - target) ** 2 / (var + limit))
    loss = loss + 0.5 * math.log(2 * math.pi) if full else loss
    return {"mean": torch.mean, "sum": torch.sum}[reduction](loss) if reduction != "none" else loss


def _take(x: Any, index: Any) -> Any:
    flat = x.reshape(-1)
    places = torch.where(index < 0, index + flat.shape[0], index)
    return flat.index_select(0, places.reshape(-1)).reshape(index.shape)


_original_istft = torch.istft


def _istft(
    x: Any, n_fft: int, hop: Any = None, size: Any = None, window: Any = None, *rest: Any, **settings: Any
) -> Any:
    """Call ``torch.istft`` with a window of ones, without which torch.export fails (PyTorch 2.13)."""
    size, window = settings.pop("win_length", size), settings.pop("window", window)
    window = x.real.new_ones(size or n_fft) if window is None else window
    return _original_istft(x, n_fft, settings.pop("hop_length", hop), size, window, *rest, **settings)


_REPLACED = {
    "equal": _equal,
    "allclose": _allclose,
    "cov": _cov,
    "corrcoef": _corrcoef,
    "narrow": _narrow,
    "take": _take,
    "istft": _istft,
}
_ON_TENSORS = {getattr(place, name): f for name, f in _REPLACED.items() for place in (torch, torch.Tensor)}
_ON_TENSORS |= {torch.nn.functional.one_hot: _one_hot, torch.nn.functional.gaussian_nll_loss: _gaussian_nll_loss}


class _OnTensors(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _ON_TENSORS.get(function, function)(*args, **(kwargs or {}))


def _detect_is_causal_mask(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
    """Answer without a look at elements: a causal mask that is not recognized is applied like any other."""
    return is_causal is True


# -- operators of torch.nn in those of ATen -----------------------------------------------------------------------
def _linear_cross_entropy(
    x: Any, matrix: Any, target: Any, bias: Any, weight: Any, reduction: str, ignored: int, smoothing: float, *_: Any
) -> Any:
    logits = torch.nn.functional.linear(x, matrix, bias)
    loss = torch.nn.functional.cross_entropy(logits, target, weight, None, ignored, None, reduction, smoothing)
    return loss, *(x.new_zeros(0) for _gradient in range(3))  # the graph has its own gradients


def of_composites() -> dict[Any, Any]:
    """Return decompositions that PyTorch lacks."""
    if not hasattr(torch.ops.torch_nn, "_linear_cross_entropy_batch_chunked"):  # before PyTorch 2.13
        return {}
    return {
        torch.ops.torch_nn._linear_cross_entropy_batch_chunked.default: _linear_cross_entropy,
        torch.ops.torch_nn._linear_cross_entropy_batch_chunked_no_reduction.default: (
            lambda x, matrix, target, bias, weight, ignored, *_: _linear_cross_entropy(
                x, matrix, target, bias, weight, "none", ignored, 0.0
            )[0]
        ),
    }


@contextmanager
def kept_whole() -> Iterator[None]:
    """Replace the functions of PyTorch while a module is exported."""
    replaced = [(torch._VF, name, _replaced(name)) for name in packed.NAMES]
    replaced += packed.replaced()
    replaced.append((torch, "ctc_loss", _ctc))
    replaced.append((torch.nn.modules.transformer, "_detect_is_causal_mask", _detect_is_causal_mask))
    originals = {(id(place), name): vars(place).get(name) for place, name, _ in replaced}
    try:
        for place, name, function in replaced:
            setattr(place, name, function)
        with _OnTensors():
            yield
    finally:
        for place, name, _ in replaced:
            original = originals[id(place), name]
            delattr(place, name) if original is None else setattr(place, name, original)
