"""The lowering table: rows by operation, each with a condition; the reference for operations without a row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mithril.backend import (
    PluginLowering,
    applicable,
    check_results,
    host_function,
    lowering_error_context,
    plugin_lowerings,
)
from mithril.graph import DType, Node, Op, Registry, float32, int32, reads_rows
from mithril_ggml.library.library import ggml
from mithril_ggml.program.program_builder import ProgramBuilder, static
from mithril_ggml.program.strided_tensor import Tensor

Operand = Tensor | None
Row = Callable[..., Any]  # (draft, node, *operands) -> Tensor | tuple of them
When = Callable[[Node], bool]

TABLE: Registry[tuple[Row, When | None]] = Registry("lowering to GGML")
PACKED: Registry[tuple[int, ...]] = Registry(
    "packed weights of GGML"
)  # the operands of which a row reads the packed form


def row(*names: str, when: When | None = None, packed: tuple[int, ...] = ()) -> Callable[[Row], Row]:
    """Enter how operations are lowered where the condition holds; ``packed``: operands that it reads packed."""

    def register(function: Row) -> Row:
        for name in names:
            TABLE[name] = (function, when)
            PACKED[name] = packed
        return function

    return register


def lowers(node: Node) -> bool:
    """Whether a node is not decomposed: every primitive, and composites with a row."""
    return not node.op.composite or plugin_lowering(node) is not None or _row(node) is not None


def plugin_lowering(node: Node) -> PluginLowering | None:
    """Return the lowering that a plugin provides for a node."""
    return applicable(plugin_lowerings("ggml"), node)


def falls_back(node: Node) -> bool:
    """Whether a third party's primitive runs as its reference; those of the core are at home in NumPy."""
    op = node.op
    is_foreign = not op.reference.__module__.startswith("mithril.")
    return is_foreign and not op.composite and not node.regions and plugin_lowering(node) is None and _row(node) is None


def has_row(node: Node) -> bool:
    """Whether a node has a lowering of its own."""
    return _row(node) is not None


def _row(node: Node) -> Row | None:
    row = TABLE.get(node.op.name)
    if row is None or (row[1] is not None and not row[1](node)):
        return None
    return row[0]


def emit(draft: ProgramBuilder, node: Node, operands: Sequence[Operand]) -> None:
    """Write the steps of a node."""
    draft.node = node
    lowering = plugin_lowering(node)
    if lowering is not None:
        emitted = by_plugin(lowering, draft, node, *operands)
    else:
        emitted = (_row(node) or reference_function)(draft, node, *operands)
    results = (emitted,) if isinstance(emitted, Tensor) else tuple(emitted)
    draft.values.update(zip(node.results, results, strict=True))


def reads_packed(node: Node, operand: int) -> bool:
    """Whether the packed form of an operand can be read; declarations get it widened."""
    lowering = plugin_lowering(node)
    if lowering is not None:
        return not lowering.is_writer("draft")
    return operand in PACKED[node.op.name] if _row(node) is not None else not node.regions


def by_plugin(lowering: PluginLowering, draft: ProgramBuilder, node: Node, *operands: Operand) -> Any:
    """Emit the steps of a plugin's writer, ``(draft, node, *operands)``, or a call of its kernel on arrays."""
    label = lowering.label(node)
    if not lowering.is_writer("draft"):
        return on_host(draft, node, operands, host_function(node, lowering))
    with lowering_error_context(label):
        results = lowering.target(draft, node, *operands)
    types = [(v.dtype, static(v)) for v in node.results]
    check_results(label, types, (results,) if isinstance(results, Tensor) else results)
    return results


def on_host(
    draft: ProgramBuilder, node: Node, operands: Sequence[Operand], function: Callable[..., tuple[Any, ...]]
) -> tuple[Tensor, ...]:
    """Emit one step that calls a function of NumPy arrays."""
    results = tuple(draft.like(v) for v in node.results)
    present = [t is not None for t in operands]

    def run(*arrays: Any) -> None:
        left = iter(arrays)
        arguments = [next(left) if is_present else None for is_present in present]
        for out, value in zip(left, function(*arguments), strict=True):
            out[...] = value

    read = [t if t is None else unpack_operand(draft, node, k, t) for k, t in enumerate(operands)]
    draft.numpy(node.op.name, run, [t for t in read if t is not None], results)
    return results


def reference_function(draft: ProgramBuilder, node: Node, *operands: Operand) -> tuple[Tensor, ...]:
    """Emit a call of the operation's NumPy reference on arrays in the arena."""
    if falls_back(node):
        return on_host(draft, node, operands, host_function(node, None))
    results = tuple(draft.like(v) for v in node.results)
    present = [t is not None for t in operands]
    function = declared(node.op, dict(node.attributes), present, len(node.op.results))
    read = [t if t is None else unpack_operand(draft, node, k, t) for k, t in enumerate(operands)]
    draft.numpy(node.op.name, function, [t for t in read if t is not None], results)
    draft.settings.declared.add(node.op.name)
    return results


def unpack_operand(draft: ProgramBuilder, node: Node, k: int, operand: Tensor) -> Tensor:
    """Unpack an operand if it is packed; return other operands unchanged."""
    packed = draft.settings.packed(draft, node, k)
    if packed is None:
        return operand
    rows, columns = packed.shape
    every = draft.constant_tensor(np.arange(rows, dtype=np.int32), int32)
    out = draft.new((rows, columns))
    draft.ggml("get_rows", ggml.ggml_get_rows, [packed, every], out)
    return out if reads_rows(node, k) == "rows" else out.transposed((1, 0))


def declared(op: Op, attributes: dict[str, Any], present_operands: Sequence[bool], count: int) -> Callable[..., None]:
    """Return a function that calls the reference and copies its results to their buffers."""
    reference, present = op.reference, sum(present_operands)

    def run(*arrays: Any) -> None:
        left = iter(arrays[:present])
        results = reference(*[next(left) if is_present else None for is_present in present_operands], **attributes)
        for out, value in zip(arrays[present:], (results,) if count == 1 else results):
            out[...] = value

    return run


# -- conditions ---------------------------------------------------------------------------------------------------
def dtype_of(node: Node, k: int = 0) -> DType:
    operand = node.operands[k]
    assert operand is not None
    return operand.dtype


def is_single(node: Node) -> bool:
    """Whether all operands and results are float32 and none is empty."""
    return is_filled(node) and all(v.dtype is float32 for v in (*node.operands, *node.results) if v is not None)


def is_integer(node: Node) -> bool:
    return bool(dtype_of(node).is_integer)


def is_filled(node: Node) -> bool:
    """No operand is without elements."""
    return not any(type(n) is int and n == 0 for v in (*node.operands, *node.results) if v is not None for n in v.shape)


Array = np.ndarray[Any, Any]
