"""``mithril backends --coverage NAME``: operations that a backend lowers, and those that it runs by their bodies.

A backend must lower the primitives to pass the kit; composites without a lowering are decomposed, and some backends run
primitives of plugins by their NumPy references. The list is derived from the declarations of operations and from the
backend, so there is no second list to maintain.
"""

from __future__ import annotations

from collections.abc import Iterator

from mithril import plugins
from mithril.backend import Backend
from mithril.graph import (
    Builder,
    MithrilError,
    Node,
    Op,
    UnsupportedError,
    decompose,
    emit,
    operation,
    operations,
    types_of,
)


def coverage(name: str) -> list[dict[str, str]]:
    """Return a row for each operation, mithril's own and those of plugins: its kind, and how the backend runs it."""
    backend = plugins.backend_class(name)()
    for declared in plugins.op_names():
        operation(declared)
    rows = []
    for op in (o for _, o in sorted(operations().items())):
        kind = "composite" if op.composite else "primitive"
        states = list(dict.fromkeys(_state(backend, node) for node in _calls(op)))
        rows.append({"operation": op.name, "kind": kind, "state": "; ".join(states) or "no samples"})
    return rows


def _calls(op: Op) -> Iterator[Node]:
    """Yield the operation's node in a graph of each of its samples."""
    for sample in op.samples:
        with Builder("call") as builder:
            operands = [
                None if s is None else builder.input(f"x{k}", s.shape, s.dtype) for k, s in enumerate(sample.operands)
            ]
            if any(value is not None for value in operands):
                op(*operands, **sample.attributes)
            else:
                emit(op, (), sample.attributes)
        yield next(node for node in reversed(builder.nodes) if node.op is op)


def _state(backend: Backend, node: Node) -> str:
    op = node.op
    try:
        if backend.lowers(node):
            return "lowered"
        if backend.falls_back(node):
            return "by its reference"
        if not op.composite:
            return "missing"
        types = types_of(node.operands)
        body = op.decompose(types, node.attributes)
        decompose(body, lambda part: backend.lowers(part) or backend.falls_back(part))
    except UnsupportedError as error:
        return f"body needs {error.what.rpartition(': ')[2]}"
    except MithrilError as error:
        return f"refused: {error.what}"
    return "by its body"
