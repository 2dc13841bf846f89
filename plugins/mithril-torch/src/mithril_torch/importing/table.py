"""The table of ATen operators: one function of tensors and numbers each, and how operands are promoted.

A tensor is a value of the graph, or a NumPy array where it is known while the model is built: operations on arrays
compute their references, which folds constants. Sizes are ints or Dims.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any

import ml_dtypes
import numpy as np
import torch

from mithril import ops
from mithril.graph import Dim, UnsupportedError, Value, dtype as as_dtype, is_static
from mithril_importing.arrays import arrays_of, as_value, broadcast, converted
from mithril_importing.complex_numbers import Complex

IGNORED = ("layout", "device", "pin_memory", "memory_format", "non_blocking", "generator", "requires_grad")


PASSED = frozenset({"like", "layer", "operand"})  # the recorded type of the result, the root, that of the first operand


@dataclass(frozen=True)
class Row:
    """The meaning of an ATen operator."""

    function: Callable[..., Any]
    promotes: str  # "result": operands are cast to the result's dtype; "operands": to their common dtype
    reads: frozenset[str]  # of PASSED, which the function also takes


ROWS: dict[str, Row] = {}


def row(*names: str, promotes: str = "") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter the decorated function for ATen operators; an overload is written as ``add.Tensor``."""

    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        reads = frozenset(signature(function).parameters) & PASSED
        ROWS.update((name, Row(function, promotes, reads)) for name in names)
        return function

    return enter


def name_of(target: Any) -> str:
    """Return the name of an operator in the table: ``relu``, ``add.Tensor``, or with its namespace if not ATen's."""
    name = target.name() if isinstance(target, torch._ops.OpOverload) else str(target)
    return name.removeprefix("aten::").removesuffix(".default")


def modules_of(node: Any) -> dict[str, tuple[Any, ...]]:
    """Return the path and class of each module around a node by its call, outermost first; none if it is torch's."""
    modules = node.meta.get("nn_module_stack") or {}
    return {} if "_empty_nn_module_stack_from_metadata_hook" in modules else modules  # torch 2.13 names no module so


# -- tensors ------------------------------------------------------------------------------------------------------
def is_tensor(x: Any) -> bool:
    return isinstance(x, (Value, np.ndarray))


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def array_of(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return the array of a tensor, without a copy where possible."""
    host = tensor.detach().cpu()
    if host.dtype == torch.bfloat16:
        return host.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)  # type: ignore[no-any-return]
    return host.numpy()  # type: ignore[no-any-return]


def tensor_of(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """Return the tensor of an array."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(np.array(array).view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.array(array))


def cast(x: Any, dtype: torch.dtype | str | None) -> Any:
    """Return a tensor, number or size as a tensor of this dtype; without one, unchanged."""
    if dtype is None:
        return x
    if isinstance(dtype, torch.dtype) and dtype.is_complex:
        return Complex.of(cast(x, dtype.to_real()))
    kind = as_dtype(dtype if isinstance(dtype, str) else dtype_name(dtype))
    if isinstance(x, Dim):
        return ops.cast(as_value(ops.size_value(value=x)), dtype=kind)
    return converted(x, kind)


def sizes_of(x: Any) -> tuple[Any, ...]:
    return tuple(x.shape)


def axis_of(x: Any, dim: int) -> int:
    """Return a non-negative axis; scalars have axis 0, as in PyTorch."""
    rank = max(len(x.shape), 1)
    return dim + rank if dim < 0 else dim


def axes_of_dims(x: Any, dim: Any) -> tuple[int, ...]:
    """Return non-negative axes; None and an empty list mean all, as does any axis of a scalar."""
    if not len(x.shape):
        return ()
    if dim is None or (not isinstance(dim, int) and not len(dim)):
        return tuple(range(len(x.shape)))
    return tuple(axis_of(x, d) for d in ([dim] if isinstance(dim, int) else dim))


def filled(shape: Any, value: Any, dtype: torch.dtype) -> Any:
    """Return an array or value filled with a number or a rank-0 tensor."""
    if dtype.is_complex:
        number = Complex.of(value)
        return Complex(*(filled(shape, part, dtype.to_real()) for part in (number.re, number.im)))
    shape, kind = tuple(shape), as_dtype(dtype_name(dtype))
    if is_tensor(value) or isinstance(value, Dim):
        return broadcast(cast(value, dtype), shape)
    if is_static(shape):
        return np.full(shape, value, kind.numpy)
    return ops.full(shape=shape, value=bool(value) if kind.is_bool else value, dtype=kind)


def line(length: Any, dtype: torch.dtype | str) -> Any:
    """Return 0, 1, ..., length - 1."""
    kind = as_dtype(dtype if isinstance(dtype, str) else dtype_name(dtype))
    return np.arange(length).astype(kind.numpy) if isinstance(length, int) else ops.iota(shape=(length,), dtype=kind)


def known(x: Any, purpose: str) -> np.ndarray[Any, Any]:
    """Return a tensor that is known while the model is built, else raise UnsupportedError."""
    if isinstance(x, Value):
        raise UnsupportedError(f"{purpose} depends on data: the sizes of its result are unknown")
    return np.asarray(x)


# -- calls --------------------------------------------------------------------------------------------------------
def call(row: Row, node: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], layer: Any, example: Any) -> Any:
    """Call the function of a node, with its operands promoted to ``example``; numbers of NumPy become arrays."""
    options = {n: v for n, v in kwargs.items() if n not in IGNORED}
    if row.promotes:
        kind = example.dtype if row.promotes == "result" else _common(node)
        args = tuple(cast(a, kind) if is_tensor(a) or isinstance(a, Dim) else a for a in args)
    if "like" in row.reads:
        options["like"] = example
    if "layer" in row.reads:
        options["layer"] = layer
    if "operand" in row.reads:
        options["operand"] = node.args[0].meta["val"]
    return arrays_of(row.function(*args, **options))


def _common(node: Any) -> torch.dtype:
    """Return the dtype in which PyTorch computes a comparison."""
    operands = [a.meta["val"] if isinstance(a, torch.fx.Node) else a for a in node.args[:2]]
    operands = [a if isinstance(a, (torch.Tensor, bool, int, float)) else 1 for a in operands]  # a symbolic size
    return torch.result_type(*operands)
