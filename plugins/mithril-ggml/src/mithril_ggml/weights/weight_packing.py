"""Which weights of a program are packed: those that products and look-ups read as rows of a matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mithril import ops
from mithril.graph import Decisions, Graph, Input, Node, Value, float32, is_matrix_transpose, is_product, reads_rows
from mithril_ggml.library.quant_types import QuantType, compatible_type
from mithril_ggml.library.repack import is_supported
from mithril_ggml.lowering.table import has_row as lowered, reads_packed
from mithril_ggml.program.executable import BoundInput
from mithril_ggml.program.program_builder import ProgramBuilder
from mithril_ggml.program.strided_tensor import Storage, Tensor
from mithril_ggml.weights.packed_weights import PackedArray, Store
from mithril_ggml.weights.quantize_recipe import QuantizationRecipe, ternary_kind


@dataclass(eq=False)
class PackedWeight:
    """A weight to be packed. ``transposed``: its columns are the packed rows."""

    value: Value  # in the graph that reads it, which may be a region
    input: Input  # of the whole program
    kind: QuantType
    transposed: bool
    ternary: bool = False  # pack the result of ``ternarize``
    repacked: bool = False
    readers: list[tuple[Node, int]] = field(default_factory=list)
    tensor: Tensor | None = None

    @property
    def rows(self) -> tuple[int, int]:
        n, k = self.input.type.shape
        return (k, n) if self.transposed else (n, k)  # type: ignore[return-value]

    @property
    def nbytes(self) -> int:
        """The bytes of the packed rows."""
        return self.rows[0] * self.kind.row(self.rows[1])


class Packing:
    """The packed weights of one graph, and of the regions inside that read its weights."""

    def __init__(self, entries: Sequence[PackedWeight], inner: Mapping[tuple[int, int], Packing], store: Store) -> None:
        self.entries = list(entries)
        self.inner = dict(inner)  # by node and number of the region
        self.store = store
        self._by_reader = {(id(node), k): e for e in entries for node, k in e.readers}

    @classmethod
    def of(cls, graph: Graph, recipe: QuantizationRecipe, store: Store, decisions: Decisions) -> Packing | None:
        """Apply the recipe to the weights of a graph; return None for a graph with gradients."""
        if graph.results_of("gradient"):
            decisions.record("choice", "weights are not quantized in programs with gradients")
            return None
        return _find_packable(
            graph, {i.value: i for i in graph.with_role("param", "constant")}, recipe, store, decisions
        )

    @property
    def all_entries(self) -> list[PackedWeight]:
        """Those of regions as well, each weight once."""
        entries = {e.input.name: e for e in self.entries}
        for packing in self.inner.values():
            for e in packing.all_entries:
                entries.setdefault(e.input.name, e)
        return list(entries.values())

    def region_weights(self, graph: Graph) -> set[Value]:
        """Weights that this graph only hands to regions which read them packed: they come as the caller has them."""
        values: set[Value] = set()
        for node in graph.nodes:
            for k in range(len(node.regions)):
                packing = self.inner.get((id(node), k))
                packed = {e.value for e in packing.entries} if packing is not None else set()
                nested = packing.region_weights(node.regions[k]) if packing is not None else set()
                values.update(v for i, v in fixed_arguments(node, k) if i.value in packed or i.value in nested)
        read = {
            v for node in graph.nodes for v in node.operands if not node.regions or not _is_fixed_argument_only(node, v)
        }  # fmt: skip
        return values - read - set(graph.outputs)

    def reads(self, node: Node, operand: int) -> bool:
        """Whether a node reads the packed form of an operand."""
        return (id(node), operand) in self._by_reader

    def tensor(self, node: Node, operand: int) -> Tensor | None:
        """Return the packed matrix that a node reads instead of its operand, or None."""
        entry = self._by_reader.get((id(node), operand))
        return entry.tensor if entry is not None else None

    def place(self, draft: ProgramBuilder) -> list[BoundInput]:
        """Places for the packed forms, and who fills them."""
        bound_inputs = []
        for e in self.entries:
            storage = Storage(e.nbytes, "given", e.value.name)
            draft.storages.append(storage)
            e.tensor = Tensor(storage, e.rows, (e.kind.row(e.rows[1]), 0), float32, packed=e.kind, repacked=e.repacked)
            shape = e.input.type.shape
            role = e.input.role if e.value is e.input.value else "input"
            bound = BoundInput(e.value.name, role, e.tensor, shape, float32.numpy)  # type: ignore[arg-type]
            bound.convert = self._filler(e)
            bound.value = e.input.data
            bound_inputs.append(bound)
        return bound_inputs

    def _filler(self, e: PackedWeight) -> Any:
        def fill(x: Any) -> tuple[Any, int]:
            packed = self.store.packed(x, e.kind, e.transposed, e.ternary, f"'{e.input.name}'")
            if e.repacked:
                repacked = self.store.repacked(packed)
                return (packed, repacked), repacked.address
            return packed, packed.pinned().ctypes.data

        return fill

    def sizes(self) -> dict[str, int]:
        """Return the bytes of packed weights by name."""
        return {e.input.name: e.nbytes for e in self.all_entries}

    def release(self) -> None:
        """Release constants that have been packed."""
        for entry in self.all_entries:
            entry.input = replace(entry.input, data=None)

    def packed(self, values: dict[str, Any]) -> dict[str, PackedArray]:
        """Return the packed forms of parameters."""
        out = {}
        for e in self.all_entries:
            x = e.input.data if e.input.data is not None else values[e.input.name]
            name = f"'{e.input.name}'"
            out[e.input.name] = self.store.packed(x, e.kind, e.transposed, e.ternary, name, freeze=False)
        return out


def _is_matrix(value: Value) -> bool:
    return value.dtype is float32 and value.ndim == 2 and all(type(n) is int and n > 0 for n in value.shape)


def _is_narrow(value: Value) -> bool:
    return value.dtype.is_float and value.dtype is not float32


def _weight_views(graph: Graph) -> dict[Value, tuple[Value, bool, bool]]:
    """Return the values that are a transposed or ternarized weight: the weight, whether transposed, whether ternary.

    So are float32 forms of 16-bit weights.
    """
    sources: dict[Value, tuple[Value, bool, bool]] = {}
    for node in graph.nodes:
        operand = node.operands[0] if node.operands else None
        if operand is not None and (is_matrix_transpose(node) or node.op is ops.ternarize):
            source, is_transposed, ternary = sources.get(operand, (operand, False, False))
            turn = node.op is not ops.ternarize
            sources[node.result] = (source, is_transposed != turn, ternary or not turn)
        elif operand is not None and node.op is ops.cast and _is_narrow(operand):
            sources[node.result] = sources.get(operand, (operand, False, False))
    return sources


@dataclass(frozen=True)
class _Reader:
    """How an operation reads a weight."""

    value: Value
    input: Input
    transposed: bool
    ternary: bool
    at: tuple[Node, int]


def _columns(node: Node, k: int) -> bool | None:
    """Whether an operand is read as a matrix of columns (True) or of rows (False); None if it is neither."""
    values = [v for v in (*node.operands, *node.results) if v is not None]
    if any(type(n) is int and n == 0 for v in values for n in v.shape):
        return None
    read = reads_rows(node, k)
    return None if read is None or not reads_packed(node, k) else read == "columns"


def _find_packable(
    graph: Graph,
    weights: Mapping[Value, Input],
    recipe: QuantizationRecipe,
    store: Store,
    decisions: Decisions,
    depth: int = 0,
) -> Packing:
    """Find the weights that a graph and its regions use. ``weights``: the program's, by value in this graph."""
    seen = _weight_views(graph)
    entries: dict[Value, PackedWeight] = {}
    inner: dict[tuple[int, int], Packing] = {}
    for node in graph.nodes:
        for k, region in enumerate(node.regions):
            bound = {i.value: weights[v] for i, v in fixed_arguments(node, k) if v in weights}
            packing = _find_packable(region, bound, recipe, store, decisions, depth + 1) if bound else None
            if packing is not None and packing.all_entries:
                inner[id(node), k] = packing
        for k, operand in reversed([*enumerate(node.operands)]):
            columns = _columns(node, k) if operand is not None and operand.ndim == 2 else None
            if columns is None or operand is None:
                continue
            source, flips, ternary = seen.get(operand, (operand, False, False))
            if source not in weights or (ternary and depth):
                continue
            if _is_narrow(source):
                message = f"'{weights[source].name}' is {source.dtype}: only float32 weights are quantized"
                decisions.record("ignored", message)
            elif _is_matrix(source):
                reader = _Reader(source, weights[source], columns != flips, ternary, (node, k))
                _enter(entries, reader, recipe, decisions)
                break  # a product reads one packed operand at most
    for value, e in list(entries.items()):
        if e.ternary and any(node.op is not ops.ternarize for node in graph.users[value]):
            decisions.record("choice", f"'{e.input.name}' stays float32: not only its ternary form is read")
            del entries[value]
    for e in entries.values():
        multiplied = all(is_product(node) and lowered(node) for node, _ in e.readers)  # not by rows
        e.repacked = multiplied and is_supported(e.kind, *e.rows)
    return Packing(list(entries.values()), inner, store)


def fixed_arguments(node: Node, number: int) -> list[tuple[Input, Value]]:
    """Return the loop-invariant arguments of a region with their operands."""
    name, a = node.op.name, node.attributes
    if name == "if":
        skipped, first = 0, 1
    elif name == "while":
        skipped, first = a["states"], 0
    elif name == "scan":
        skipped, first = a["carries"] + a["sequences"], 0
    else:
        return []
    pairs = zip(node.regions[number].arguments[skipped:], node.operands[first + skipped :])
    return [(i, v) for i, v in pairs if v is not None]


def _is_fixed_argument_only(node: Node, value: Value | None) -> bool:
    """Whether a node with regions reads an operand in no other way than as a fixed argument."""
    fixed = [v for _, v in fixed_arguments(node, 0)]
    return fixed.count(value) == node.operands.count(value)  # type: ignore[arg-type]


def _enter(
    entries: dict[Value, PackedWeight], reader: _Reader, recipe: QuantizationRecipe, decisions: Decisions
) -> None:
    i = reader.input
    entry = entries.get(reader.value)
    if entry is not None:
        if entry.transposed is reader.transposed and entry.ternary is reader.ternary:
            entry.readers.append(reader.at)
        return
    requested = recipe.requested_type(i.name)
    if requested is None:
        return
    length = int(i.type.shape[0 if reader.transposed else 1])
    quant_type = (
        compatible_type(requested, length) if not reader.ternary or i.name in recipe.exact else ternary_kind(length)
    )
    if reader.ternary and quant_type is not requested:
        decisions.record("choice", f"'{i.name}' has weights of three values: {quant_type} holds them without loss")
    elif quant_type is not requested:
        decisions.record(
            "downgrade",
            f"'{i.name}' is {quant_type}: {requested} needs rows of a multiple of {requested.block} elements, "
            f"these have {length}",
        )
    entries[reader.value] = PackedWeight(
        reader.value, i, quant_type, reader.transposed, reader.ternary, readers=[reader.at]
    )
