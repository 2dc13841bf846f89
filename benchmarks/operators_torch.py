"""PyTorch's own database of operators (OpInfo): each is imported with its samples and compared with PyTorch.

``python benchmarks/operators_torch.py --backend numpy --samples 100 [NAME ...]`` prints one line per operator, values
and gradients, and the totals on standard error.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

import mithril as ml
from mithril.graph import MithrilError

TOLERANCE = {"rtol": 1e-3, "atol": 1e-4}
RANDOM = frozenset(  # of their results only shapes and dtypes are defined
    {"bernoulli", "cauchy", "exponential", "geometric", "log_normal", "multinomial", "normal", "rand_like", "randint"}
    | {"randint_like", "randn", "randn_like", "uniform", "normal.in_place", "normal.number_mean", "pca_lowrank"}
    | {"svd_lowrank", "nn.functional.dropout", "nn.functional.dropout2d", "nn.functional.dropout3d"}
    | {"nn.functional.alpha_dropout", "nn.functional.feature_alpha_dropout.with_train", "nn.functional.rrelu"}
    | {"nn.functional.fractional_max_pool2d", "nn.functional.fractional_max_pool3d"}
    | {"nn.functional.scaled_dot_product_attention"}  # its samples with dropout
    | {"nn.functional.multi_head_attention_forward"}
    | {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
)
UP_TO_SIGN = frozenset(  # vectors of these factorizations are defined up to signs
    {"linalg.eigh", "linalg.svd", "svd", "linalg.qr", "qr", "geqrf", "linalg.eig"}
)


def operators() -> dict[str, Any]:
    """Return the operators of the database by name, with their variants."""
    return {op.full_name: op for op in op_db}


def dtype_of(op: Any) -> torch.dtype | None:
    dtypes = op.supported_dtypes("cpu")
    for dtype in (torch.float32, torch.int64, torch.complex64):
        if dtype in dtypes:
            return dtype
    return None


def samples_of(op: Any, count: int) -> list[Any]:
    """Return samples, evenly chosen: the input, positional and named arguments, without sparse tensors."""
    torch.manual_seed(0)
    dtype = dtype_of(op)
    if dtype is None:
        return []
    try:
        drawn = list(op.sample_inputs("cpu", dtype, requires_grad=False))
    except (StopIteration, NotImplementedError):
        return []
    dense = [(s.input, s.args, s.kwargs) for s in drawn]
    dense = [s for s in dense if all(_is_dense(t) for t in pytree.tree_leaves(s))]
    step = max(len(dense) / count, 1.0)
    return [dense[int(k * step)] for k in range(min(count, len(dense)))]


def _is_dense(x: Any) -> bool:
    return not isinstance(x, torch.Tensor) or (x.layout is torch.strided and not x.is_quantized)


class Calls(torch.nn.Module):
    """One operator, called with all samples: one export covers them."""

    def __init__(self, op: Any, samples: list[Any]) -> None:
        super().__init__()
        self.op, self.samples = op, [pytree.tree_flatten(s) for s in samples]

    def tensors(self) -> list[torch.Tensor]:
        return [leaf for leaves, _ in self.samples for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def forward(self, *tensors: Any) -> list[Any]:
        leaves_left, results = iter(tensors), []
        for leaves, spec in self.samples:
            arguments = [next(leaves_left) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            if not self.op.full_name.startswith("empty"):  # operators in place must not change the inputs
                arguments = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in arguments]
            first, args, kwargs = pytree.tree_unflatten(arguments, spec)
            results.append([r for r in pytree.tree_leaves(self.op(first, *args, **kwargs)) if _is_result(r)])
        return results


def _is_result(x: Any) -> bool:
    return isinstance(x, (torch.Tensor, bool, int, float, torch.SymInt, torch.SymFloat, torch.SymBool))


def array_of(x: Any) -> np.ndarray[Any, Any]:
    """Return a result; complex numbers are pairs."""
    x = torch.as_tensor(x).detach().resolve_conj().resolve_neg()
    x = torch.view_as_real(x) if x.is_complex() else x
    return x.float().numpy() if x.dtype == torch.bfloat16 else x.numpy()


def array_as_given(x: torch.Tensor) -> np.ndarray[Any, Any]:
    x = torch.view_as_real(x.detach().resolve_conj()) if x.is_complex() else x.detach().resolve_neg()
    if x.dtype == torch.bfloat16:
        return x.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return x.numpy()


def check(op: Any, samples: list[Any], backend: str, gradients: bool) -> str:
    """Return ``equal``, or the class of the difference and its reason."""
    calls = Calls(op, samples)
    tensors = calls.tensors()
    inputs = [t.detach().clone().requires_grad_(gradients and t.is_floating_point()) for t in tensors]
    torch.manual_seed(0)
    try:
        theirs = pytree.tree_leaves(calls(*inputs))
    except Exception as error:
        return f"pytorch: {type(error).__name__}: {first_line(error)}"
    cotangents = [_cotangent(r) if gradients else None for r in theirs]
    try:
        model = ml.from_torch(calls, tuple(t.detach() for t in tensors), training=False)
        wrt = [n for n, t in zip(model.inputs, inputs, strict=True) if t.requires_grad]
        compiled = ml.compile(model, backend, optimization_level="low", trainable=wrt)
        arrays = {n: array_as_given(t) for n, t in zip(model.inputs, tensors, strict=True)}
        values = compiled.evaluate({}, arrays)
        slopes = None
        seeds = {n: array_as_given(c) for n, c in zip(model.outputs, cotangents, strict=True) if c is not None}
        if seeds and wrt:
            slopes = compiled.evaluate({}, arrays, seeds, training=False)[1]
    except MithrilError as error:
        kind = "pytorch" if "torch.export cannot" in str(error) else "refused"
        return f"{kind}: {first_line(error)}"
    except Exception as error:
        return f"foreign: {type(error).__name__}: {first_line(error)}"
    for name, value, other in zip(model.outputs, values.values(), theirs, strict=True):
        problem = difference(op.full_name, _host(value), array_of(other))
        if problem:
            return f"wrong: {name}: {problem}"
    if slopes is None or op.full_name in RANDOM | UP_TO_SIGN:
        return "equal"
    pairs = [(r, c) for r, c in zip(theirs, cotangents, strict=True) if c is not None]
    expected = torch.autograd.grad([r for r, _ in pairs], inputs_of(inputs), [c for _, c in pairs], allow_unused=True)
    for name, theirs_, start in zip(wrt, expected, inputs_of(inputs), strict=True):
        theirs_ = torch.zeros_like(start) if theirs_ is None else theirs_
        problem = difference(op.full_name, _host(slopes[name]), array_of(theirs_))
        if problem:
            return f"gradient: {name}: {problem}"
    return "equal"


def inputs_of(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    return [t for t in inputs if t.requires_grad]


def _cotangent(result: Any) -> torch.Tensor | None:
    if not isinstance(result, torch.Tensor) or not result.requires_grad or result.is_complex():
        return None
    return torch.randn(result.shape, generator=torch.Generator().manual_seed(result.numel())).to(result.dtype)


def _host(x: Any) -> np.ndarray[Any, Any]:
    array = array_of(x.cpu()) if isinstance(x, torch.Tensor) else np.asarray(x)
    return array.astype(np.float32) if array.dtype == ml_dtypes.bfloat16 else array


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or ["without a message"]
    return lines[0][:300]


def difference(name: str, value: np.ndarray[Any, Any], theirs: np.ndarray[Any, Any]) -> str:
    """Return the difference of two results, or an empty text."""
    if value.shape != theirs.shape:
        return f"shape {value.shape}, in PyTorch {theirs.shape}"
    if name in RANDOM:
        return ""
    if name in UP_TO_SIGN:
        value, theirs = np.abs(value), np.abs(theirs)
    if np.allclose(value, theirs, equal_nan=True, **TOLERANCE):
        return ""
    differs = ~np.isclose(value, theirs, equal_nan=True, **TOLERANCE)
    place = tuple(int(k) for k in np.argwhere(differs)[0])
    return f"{differs.sum()} of {differs.size}, at {place} {value[place]} for {theirs[place]}"


def outcome(op: Any, count: int, backend: str = "numpy") -> str:
    """Return the outcome of an operator: that of all samples together, or that of the first that is not equal."""
    samples = samples_of(op, count)
    if not samples:
        return "pytorch: no dense samples on the CPU"
    gradients = bool(op.supports_autograd) and dtype_of(op) == torch.float32
    together = check(op, samples, backend, gradients)
    if together == "equal" or len(samples) == 1 or "cannot be expressed" in together:
        return together
    results = [check(op, [s], backend, gradients) for s in samples]
    kinds = Counter(r.split(":")[0] for r in results)
    worst = next(
        (r for k in ("wrong", "gradient", "foreign", "refused", "pytorch") for r in results if r.startswith(k)), ""
    )
    if not worst:
        return f"together {together}"
    return f"{worst} ({kinds.get('equal', 0)} of {len(samples)} samples equal)"


def outcomes(names: list[str], count: int, backend: str) -> Iterator[tuple[str, str]]:
    by_name = operators()
    for name in names or by_name:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield name, outcome(by_name[name], count, backend)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--backend", default="numpy")
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--part", default="0/1")
    settings = parser.parse_args()
    part, parts = map(int, settings.part.split("/"))
    names = (settings.names or [*operators()])[part::parts]
    totals: Counter[str] = Counter()
    for name, result in outcomes(names, settings.samples, settings.backend):
        totals[result.split(":")[0]] += 1
        print(f"{name}: {result}", flush=True)
    print(dict(totals), file=sys.stderr)


if __name__ == "__main__":
    main()
