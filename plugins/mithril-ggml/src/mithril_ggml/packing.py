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
from mithril_ggml.quantize import Recipe, ternary_kind
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
    ternary: bool = False  # of what ``ternarize`` makes of it
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
        seen = _seen_through(graph)
        entries: dict[Value, Entry] = {}
        for node in graph.nodes:
            for k, operand in enumerate(node.operands):
                columns = READ_AS_ROWS.get((node.op.name, k))
                if columns is None or operand is None or not _readable(node):
                    continue
                source, flips, ternary = seen.get(operand, (operand, False, False))
                if source in graph.input_of and _is_narrow(source):
                    decisions.record(
                        "ignored", f"'{source.name}' is {source.dtype}: only float32 weights are quantized"
                    )
                elif source in matrices:
                    found = _Reader(matrices[source], columns != flips, ternary, (node, k))
                    _enter(entries, found, recipe, decisions)
        for value, e in list(entries.items()):
            if e.ternary and any(node.op.name != "ternarize" for node in graph.users[value]):
                decisions.record("choice", f"'{e.input.name}' stays float32: not only its ternary form is read")
                del entries[value]
        for e in entries.values():
            looked_up = any(node.op.name in LOOK_UPS for node, _ in e.readers)
            e.repacked = not looked_up and suits(e.kind, *e.rows)
        return cls(list(entries.values()), store)

    def reads(self, node: Node, operand: int) -> bool:
        """Whether a node reads the packed form of an operand."""
        return (id(node), operand) in self._by_reader

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
            packed = self.store.packed(x, e.kind, e.turned, e.ternary, f"'{e.input.name}'")
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
            out[e.input.name] = self.store.packed(x, e.kind, e.turned, e.ternary, f"'{e.input.name}'")
        return out


def _is_matrix(value: Value) -> bool:
    return value.dtype is float32 and value.ndim == 2 and all(type(n) is int and n > 0 for n in value.shape)


def _is_narrow(value: Value) -> bool:
    return value.dtype.is_float and value.dtype is not float32


def _seen_through(graph: Graph) -> dict[Value, tuple[Value, bool, bool]]:
    """Values that are a weight turned, or made ternary, or both: the weight, whether turned, whether ternary."""
    found: dict[Value, tuple[Value, bool, bool]] = {}
    for node in graph.nodes:
        operand = node.operands[0] if node.operands else None
        if operand is not None and (_is_turn(node) or node.op.name == "ternarize"):
            source, turned, ternary = found.get(operand, (operand, False, False))
            turn = node.op.name != "ternarize"
            found[node.result] = (source, turned != turn, ternary or not turn)
    return found


@dataclass(frozen=True)
class _Reader:
    """How an operation reads a weight."""

    input: Input
    turned: bool
    ternary: bool
    at: tuple[Node, int]


def _is_turn(node: Node) -> bool:
    return node.op.name == "transpose" and len(node.result.shape) == 2 and node.attributes["perm"] in (None, (1, 0))


def _readable(node: Node) -> bool:
    """A look-up along the first axis; a product of something that is not empty."""
    if node.op.name == "take" and node.attributes["axis"] != 0:
        return False
    values = [v for v in (*node.operands, *node.results) if v is not None]
    return all(type(n) is not int or n > 0 for v in values for n in v.shape)


def _enter(entries: dict[Value, Entry], reader: _Reader, recipe: Recipe, decisions: Decisions) -> None:
    i = reader.input
    known = entries.get(i.value)
    if known is not None:
        if known.turned is reader.turned and known.ternary is reader.ternary:
            known.readers.append(reader.at)
        return
    wanted = recipe.wanted(i.name)
    if wanted is None:
        return
    length = int(i.type.shape[0 if reader.turned else 1])
    chosen = fitting(wanted, length) if not reader.ternary or i.name in recipe.exact else ternary_kind(length)
    if reader.ternary and chosen is not wanted:
        decisions.record("choice", f"'{i.name}' has weights of three values: {chosen} holds them without loss")
    elif chosen is not wanted:
        decisions.record(
            "downgrade",
            f"'{i.name}' is {chosen}: {wanted} needs rows of a multiple of {wanted.block} elements, "
            f"these have {length}",
        )
    entries[i.value] = Entry(i, chosen, reader.turned, reader.ternary, readers=[reader.at])
