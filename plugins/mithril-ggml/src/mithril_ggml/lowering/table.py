"""The lowering table: rows by operation, each with a condition; the declaration itself for what has no row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mithril.base.dtypes import DType, float32, int32
from mithril.base.registry import Registry
from mithril.ir import Node
from mithril.ir.traits import reads_rows
from mithril_ggml.library.library import ggml
from mithril_ggml.program.program_builder import Draft
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


def lowers(node: Node, extra: Any = ()) -> bool:
    """Whether a node is run as it is: every primitive, and composites with a row."""
    return not getattr(node.op, "composite", False) or node.op.name in extra or _row(node) is not None


def has_row(node: Node) -> bool:
    """Whether a node has a lowering of its own."""
    return _row(node) is not None


def _row(node: Node) -> Row | None:
    found = TABLE.get(node.op.name)
    if found is None or (found[1] is not None and not found[1](node)):
        return None
    return found[0]


def emit(draft: Draft, node: Node, operands: Sequence[Operand], extra: Any) -> None:
    """Write the steps of a node."""
    draft.node = node
    chosen = extra.get(node.op.name) or _row(node) or by_declaration
    made = chosen(draft, node, *operands)
    results = (made,) if isinstance(made, Tensor) else tuple(made)
    draft.values.update(zip(node.results, results, strict=True))


def reads_packed(node: Node, operand: int) -> bool:
    """Whether the packed form of an operand can be read; declarations get it widened."""
    return operand in PACKED[node.op.name] if _row(node) is not None else not node.regions


def by_declaration(draft: Draft, node: Node, *operands: Operand) -> tuple[Tensor, ...]:
    """The NumPy function that declares the operation, on arrays in the arena."""
    results = tuple(draft.like(v) for v in node.results)
    given = [t is not None for t in operands]
    function = declared(node.op, dict(node.attributes), given, len(node.op.results))  # type: ignore[attr-defined]
    read = [t if t is None else widened(draft, node, k, t) for k, t in enumerate(operands)]
    draft.numpy(node.op.name, function, [t for t in read if t is not None], results)
    draft.settings.declared.add(node.op.name)
    return results


def widened(draft: Draft, node: Node, k: int, operand: Tensor) -> Tensor:
    """The floats of an operand that is packed; other operands as they are."""
    packed = draft.settings.packed(node, k)
    if packed is None:
        return operand
    rows, columns = packed.shape
    every = draft.fixed(np.arange(rows, dtype=np.int32), int32)
    out = draft.new((rows, columns))
    draft.ggml("get_rows", ggml.ggml_get_rows, [packed, every], out)
    return out if reads_rows(node, k) == "rows" else out.transposed((1, 0))


def declared(op: Any, attributes: dict[str, Any], given: Sequence[bool], count: int) -> Callable[..., None]:
    """A step that calls the declaration and puts what it returns where it belongs."""
    reference, present = op.reference, sum(given)

    def run(*arrays: Any) -> None:
        left = iter(arrays[:present])
        made = reference(*[next(left) if there else None for there in given], **attributes)
        for out, value in zip(arrays[present:], (made,) if count == 1 else made):
            out[...] = value

    return run


# -- conditions ---------------------------------------------------------------------------------------------------
def dtype_of(node: Node, k: int = 0) -> DType:
    operand = node.operands[k]
    assert operand is not None
    return operand.dtype


def is_single(node: Node) -> bool:
    """All operands and results are float32, and none is empty."""
    values = [*(v for v in node.operands if v is not None), *node.results]
    return all(v.dtype is float32 and not any(type(n) is int and n == 0 for n in v.shape) for v in values)


def is_integer(node: Node) -> bool:
    return bool(dtype_of(node).is_integer)


def is_filled(node: Node) -> bool:
    """No operand is without elements."""
    return not any(type(n) is int and n == 0 for v in (*node.operands, *node.results) if v is not None for n in v.shape)


Array = np.ndarray[Any, Any]
