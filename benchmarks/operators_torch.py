"""PyTorch's own database of operators (OpInfo): each is imported with its samples and compared with PyTorch.

``python benchmarks/operators_torch.py --backend numpy --samples 100 [NAME ...]`` prints one line per operator, values
and gradients, and the totals on standard error.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import Counter
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

import mithril as ml
from mithril.graph import MithrilError

TOLERANCES = {torch.bfloat16: 5e-2, torch.float16: 1e-2}  # others have 1e-3
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


def dtype_of(op: Any, preferred: torch.dtype) -> torch.dtype | None:
    dtypes = op.supported_dtypes("cpu")
    return next((d for d in (preferred, torch.float32, torch.int64, torch.complex64) if d in dtypes), None)


def samples_of(op: Any, count: int, dtype: torch.dtype | None, gradients: bool) -> list[Any]:
    """Return samples, evenly chosen: the input, positional and named arguments, without sparse tensors."""
    torch.manual_seed(0)
    if dtype is None:
        return []
    try:
        drawn = list(op.sample_inputs("cpu", dtype, requires_grad=gradients))
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
            wrapper = self.op.gradcheck_wrapper  # PyTorch defines gradients of symmetric operands only
            if "hermitian" in wrapper.__name__:
                result = wrapper(self.op, first, *args, **kwargs)
            else:
                result = self.op(first, *args, **kwargs)
            results.append([r for r in pytree.tree_leaves(result) if _is_result(r)])
        return results


def _is_result(x: Any) -> bool:
    return isinstance(x, (torch.Tensor, bool, int, float, torch.SymInt, torch.SymFloat, torch.SymBool))


def array_of(x: Any) -> np.ndarray[Any, Any]:
    """Return a result; complex numbers are pairs."""
    x = torch.as_tensor(x).detach().resolve_conj().resolve_neg()
    x = torch.view_as_real(x) if x.is_complex() else x
    return (x.float() if x.dtype == torch.bfloat16 else x).numpy(force=True)


def tensor_as_given(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(x.detach().resolve_conj()) if x.is_complex() else x.detach().resolve_neg()


def array_as_given(x: torch.Tensor) -> np.ndarray[Any, Any]:
    x = tensor_as_given(x)
    if x.dtype == torch.bfloat16:
        return x.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return x.numpy()


def check(op: Any, samples: list[Any], backend: str, tolerance: float) -> str:
    """Return ``equal``, or the class of the difference and its reason."""
    calls = Calls(op, samples)
    tensors = calls.tensors()
    inputs = [t.detach().clone().requires_grad_(t.requires_grad and t.is_floating_point()) for t in tensors]
    torch.manual_seed(0)
    try:
        theirs = pytree.tree_leaves(calls(*inputs))
    except Exception as error:
        return f"pytorch: {type(error).__name__}: {first_line(error)}"
    cotangents = [_cotangent(r) for r in theirs]
    try:
        model = ml.from_torch(calls, tuple(t.detach() for t in tensors), training=False)
        wrt = [n for n, t in zip(model.inputs, inputs, strict=True) if t.requires_grad]
        compiled = ml.compile(model, backend, optimization_level="low", trainable=wrt)
        convert = tensor_as_given if backend == "torch" else array_as_given
        arrays = {n: convert(t) for n, t in zip(model.inputs, tensors, strict=True)}
        values = compiled.evaluate({}, arrays)
        slopes = None
        seeds = {n: convert(c) for n, c in zip(model.outputs, cotangents, strict=True) if c is not None}
        if seeds and wrt:
            slopes = compiled.evaluate({}, arrays, seeds, training=False)[1]
    except MithrilError as error:
        kind = "pytorch" if "torch.export cannot" in str(error) else "refused"
        return f"{kind}: {first_line(error)}"
    except Exception as error:
        return f"foreign: {type(error).__name__}: {first_line(error)}"
    for name, value, other in zip(model.outputs, values.values(), theirs, strict=True):
        problem = difference(op.full_name, _host(value), array_of(other), tolerance)
        if problem:
            return f"wrong: {name}: {problem}"
    if slopes is None or op.full_name in RANDOM | UP_TO_SIGN:
        return "equal"
    pairs = [(r, c) for r, c in zip(theirs, cotangents, strict=True) if c is not None]
    expected = torch.autograd.grad([r for r, _ in pairs], inputs_of(inputs), [c for _, c in pairs], allow_unused=True)
    for name, theirs_, start in zip(wrt, expected, inputs_of(inputs), strict=True):
        theirs_ = torch.zeros_like(start) if theirs_ is None else theirs_
        problem = difference(op.full_name, _host(slopes[name]), array_of(theirs_), tolerance)
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


def difference(name: str, value: np.ndarray[Any, Any], theirs: np.ndarray[Any, Any], tolerance: float) -> str:
    """Return the difference of two results, or an empty text."""
    if value.shape != theirs.shape:
        return f"shape {value.shape}, in PyTorch {theirs.shape}"
    if name in RANDOM:
        return ""
    if name in UP_TO_SIGN:
        value, theirs = np.abs(value), np.abs(theirs)
    largest = np.max(np.abs(theirs), initial=0.0, where=np.isfinite(theirs))
    absolute = tolerance / 10 * max(1.0, float(largest) / 10)  # sums of large terms have the error of these
    differs = ~np.isclose(value, theirs, rtol=tolerance, atol=absolute, equal_nan=True)
    if not differs.any():
        return ""
    place = tuple(int(k) for k in np.argwhere(differs)[0])
    return f"{differs.sum()} of {differs.size}, at {place} {value[place]} for {theirs[place]}"


def outcome(op: Any, count: int, backend: str, preferred: torch.dtype) -> str:
    """Return the outcome of an operator: that of all samples together, or that of the first that is not equal."""
    dtype = dtype_of(op, preferred)
    samples = samples_of(op, count, dtype, bool(op.supports_autograd) and dtype is preferred)
    if not samples:
        return "pytorch: no dense samples on the CPU"
    tolerance = TOLERANCES.get(dtype, 1e-3)
    together = check(op, samples, backend, tolerance)
    if together == "equal" or len(samples) == 1 or "cannot be expressed" in together:
        return together
    results = [check(op, [s], backend, tolerance) for s in samples]
    kinds = Counter(r.split(":")[0] for r in results)
    worst = next(
        (r for k in ("wrong", "gradient", "foreign", "refused", "pytorch") for r in results if r.startswith(k)), ""
    )
    if not worst:
        return f"together {together}"
    return f"{worst} ({kinds.get('equal', 0)} of {len(samples)} samples equal)"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--backend", default="numpy")
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--dtype", default="float32")
    settings = parser.parse_args()
    warnings.simplefilter("ignore")
    by_name, totals = operators(), Counter[str]()
    for name in settings.names or by_name:
        result = outcome(by_name[name], settings.samples, settings.backend, getattr(torch, settings.dtype))
        totals[result.split(":")[0]] += 1
        print(f"{name}: {result}", flush=True)
    print(dict(totals), file=sys.stderr)


if __name__ == "__main__":
    main()
