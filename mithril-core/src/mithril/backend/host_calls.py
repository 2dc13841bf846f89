"""Calls from programs into Python: reference implementations and kernels of plugins, with checked results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mithril.backend.plugin_lowering import Label, PluginLowering, lowering_error_context
from mithril.graph import MithrilError, Node, operation, substitute

Types = Sequence[tuple[Any, tuple[int, ...]]]  # framework dtype and shape of each result
Array = np.ndarray[Any, Any]


def reference_call(
    op: str, where: str, absent: Sequence[int] = (), **attributes: Any
) -> Callable[..., tuple[Array, ...]]:
    """Return the reference of an operation as a function of NumPy arrays. Generated programs call it by this name.

    ``absent`` are the positions of operands that are not passed.
    """
    implementation = operation(op)

    def call(*present: Any) -> tuple[Array, ...]:
        operands = [None if x is None else np.asarray(x) for x in present]
        for k in absent:
            operands.insert(k, None)
        try:
            results = implementation.evaluate(operands, attributes)
        except MithrilError as error:
            raise error.with_facts(f"in {where}" if where else "") from None
        return results if isinstance(results, tuple) else (results,)

    return call


def plugin_call(label: tuple[str, ...], types: Types, function: Callable[..., Any], *operands: Any, **keys: Any) -> Any:
    """Call the lowering of a plugin and check its results. Generated programs call it by this name."""
    name = Label(*label)
    with lowering_error_context(name):
        results = function(*operands, **keys)
    check_results(name, types, (results,) if len(types) == 1 else results)
    return results


def check_results(label: Label, types: Types, results: Any) -> None:
    """Raise unless the results have the inferred dtypes and shapes."""
    if not isinstance(results, (tuple, list)) or len(results) != len(types):
        raise label.error(f"returned {type(results).__name__}, expected {len(types)} results")
    for result, (dtype, shape) in zip(results, types, strict=True):
        if not hasattr(result, "dtype") or not hasattr(result, "shape"):
            raise label.error(f"returned {type(result).__name__}, expected an array")
        if result.dtype != dtype or tuple(result.shape) != tuple(shape):
            raise label.error(f"returned {_type_text(result.dtype, result.shape)}, expected {_type_text(dtype, shape)}")


def _type_text(dtype: Any, shape: Sequence[int]) -> str:
    if isinstance(dtype, type):
        dtype = np.dtype(dtype)
    return f"{str(dtype).rpartition('.')[2]}{list(shape)}"


def host_function(node: Node, lowering: PluginLowering | None) -> Callable[..., tuple[Array, ...]]:
    """Return a node with static sizes as a function of NumPy arrays: the kernel of a plugin, or the reference."""
    if lowering is None:
        return reference_call(node.op.name, str(node.origin), **node.attributes)
    label, target = lowering.label(node), lowering.target
    types = [(v.dtype.numpy, tuple(int(substitute(d, {})) for d in v.shape)) for v in node.results]

    def call(*operands: Any) -> tuple[Array, ...]:
        arguments = lowering.arguments(node, operands, attribute_values(node))
        with lowering_error_context(label), np.errstate(all="ignore"):
            results = target(*(a for name, a in arguments if not name), **{name: a for name, a in arguments if name})
        results = (results,) if len(types) == 1 else results
        check_results(label, types, results)
        return tuple(results)

    return call


def attribute_values(node: Node) -> Mapping[str, Any]:
    """Return the values that a kernel can take by name in addition to operands."""
    result = node.results[0]
    return {"dtype": result.dtype.numpy, "shape": result.shape, **node.attributes}
