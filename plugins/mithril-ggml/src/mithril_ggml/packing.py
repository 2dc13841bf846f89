"""Which weights of a program are packed: those that products and look-ups read as rows of a matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mithril.decisions import Decisions
from mithril.graph import Graph, Input, Node, Value
from mithril.types import float32
from mithril_ggml.draft import Draft
from mithril_ggml.executable import Given
from mithril_ggml.kinds import Kind, fitting
from mithril_ggml.quantize import Recipe
from mithril_ggml.repack import suits
from mithril_ggml.tensors import Storage, Tensor
from mithril_ggml.weights import PackedArray, Store

# Operations that read an operand as a matrix of rows, or (True) as one of columns.
READ_AS_ROWS = {("linear", 1): False, ("matmul", 1): True, ("take", 0): False, ("embedding", 1): False}
LOOK_UPS = ("take", "embedding")


@dataclass(eq=False)
class Entry:
    """A weight to be packed. ``turned``: its columns are the packed rows."""

    input: Input
    kind: Kind
    turned: bool
    repacked: bool = False
    readers: list[tuple[Node, int]] = field(default_factory=list)
    tensor: Tensor | None = None

    @property
    def rows(self) -> tuple[int, int]:
        n, k = self.input.type.shape
        return (k, n) if self.turned else (n, k)  # type: ignore[return-value]


class Packing:
    """The packed weights of one graph."""

    def __init__(self, entries: Sequence[Entry], store: Store) -> None:
        self.entries = list(entries)
        self.store = store
        self._by_reader = {(id(node), k): e for e in entries for node, k in e.readers}

    @classmethod
    def of(cls, graph: Graph, recipe: Recipe, store: Store, decisions: Decisions) -> Packing | None:
        """What the recipe says for the weights of a graph; None for one with gradients."""
        if any(name.startswith("grad/") for name in graph.output_names):
            decisions.record("choice", "weights are not quantized in programs with gradients")
            return None
        matrices = {i.value: i for i in graph.with_role("param", "constant") if _is_matrix(i.value)}
        turned = {node.result: node.operands[0] for node in graph.nodes if _is_turn(node)}
        entries: dict[Value, Entry] = {}
        for node in graph.nodes:
            for k, operand in enumerate(node.operands):
                columns = READ_AS_ROWS.get((node.op.name, k))
                source = turned.get(operand, operand) if operand is not None else None
                if columns is None or source not in matrices or not _readable(node):
                    continue
                flipped = columns != (source is not operand)
                _enter(entries, matrices[source], flipped, (node, k), recipe, decisions)
        for e in entries.values():
            looked_up = any(node.op.name in LOOK_UPS for node, _ in e.readers)
            e.repacked = not looked_up and suits(e.kind, *e.rows)
        return cls(list(entries.values()), store)

    def tensor(self, node: Node, operand: int) -> Tensor | None:
        """The packed matrix that a node reads instead of its operand."""
        found = self._by_reader.get((id(node), operand))
        return found.tensor if found is not None else None

    def place(self, draft: Draft) -> list[Given]:
        """Places for the packed forms, and who fills them."""
        made = []
        for e in self.entries:
            size = e.rows[0] * e.kind.row(e.rows[1])
            storage = Storage(size, "given", e.input.name)
            draft.storages.append(storage)
            e.tensor = Tensor(storage, e.rows, (e.kind.row(e.rows[1]), 0), float32, packed=e.kind, repacked=e.repacked)
            shape = e.input.type.shape
            given = Given(e.input.name, e.input.role, e.tensor, shape, float32.numpy)  # type: ignore[arg-type]
            given.convert = self._filler(e)
            given.value = e.input.data
            made.append(given)
        return made

    def _filler(self, e: Entry) -> Any:
        def fill(x: Any) -> tuple[Any, int]:
            packed = self.store.packed(x, e.kind, e.turned, f"'{e.input.name}'")
            if e.repacked:
                kept = self.store.repacked(packed)
                return (packed, kept), kept.address
            return packed, packed.data.ctypes.data

        return fill

    def packed(self, values: dict[str, Any]) -> dict[str, PackedArray]:
        """The packed forms of given parameters."""
        out = {}
        for e in self.entries:
            x = e.input.data if e.input.data is not None else values[e.input.name]
            out[e.input.name] = self.store.packed(x, e.kind, e.turned, f"'{e.input.name}'")
        return out


def _is_matrix(value: Value) -> bool:
    return value.dtype is float32 and value.ndim == 2 and all(type(n) is int and n > 0 for n in value.shape)


def _is_turn(node: Node) -> bool:
    return node.op.name == "transpose" and len(node.result.shape) == 2 and node.attributes["perm"] in (None, (1, 0))


def _readable(node: Node) -> bool:
    """A look-up along the first axis; a product of something that is not empty."""
    if node.op.name == "take" and node.attributes["axis"] != 0:
        return False
    values = [v for v in (*node.operands, *node.results) if v is not None]
    if node.op.name not in LOOK_UPS and any(v.dtype is not float32 for v in values):
        return False
    return all(type(n) is not int or n > 0 for v in values for n in v.shape)


def _enter(
    entries: dict[Value, Entry], i: Input, turned: bool, reader: tuple[Node, int], recipe: Recipe, decisions: Decisions
) -> None:
    known = entries.get(i.value)
    if known is not None:
        if known.turned is turned:
            known.readers.append(reader)
        return
    wanted = recipe.wanted(i.name)
    if wanted is None:
        return
    length = i.type.shape[0 if turned else 1]
    chosen = fitting(wanted, int(length))  # type: ignore[arg-type]
    if chosen is not wanted:
        decisions.record(
            "downgrade",
            f"'{i.name}' is {chosen}: {wanted} needs rows of a multiple of {wanted.block} elements, these have {length}",
        )
    entries[i.value] = Entry(i, chosen, turned, readers=[reader])
