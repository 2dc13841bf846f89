"""From a graph to an executable: inputs get places, nodes become steps, memory is planned."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mithril.backend import BuildOptions, Strategy, format_bytes
from mithril.graph import Graph, MemoryLimitError, MithrilError, Node, Value, VerificationError, iterate, verify
from mithril_ggml import lowering
from mithril_ggml.library.library import machine_memory
from mithril_ggml.program.arena_planner import plan
from mithril_ggml.program.dynamic_shapes import SizedExecutable, is_static
from mithril_ggml.program.executable import STAGED, Array, BoundInput, GGMLExecutable
from mithril_ggml.program.program_builder import ProgramBuilder, static
from mithril_ggml.program.result_buffers import own_results
from mithril_ggml.program.strided_tensor import Tensor
from mithril_ggml.weights.half_weights import half_matrices
from mithril_ggml.weights.packed_weights import Store
from mithril_ggml.weights.quantize_recipe import QuantizationRecipe
from mithril_ggml.weights.weight_packing import Packing

Region = Callable[[Node, int], Callable[[Sequence[Array]], list[Array]]]


class Settings:
    """Settings that lowerings read."""

    def __init__(
        self, packing: Packing | None, half: Mapping[int, Value], region: Region, native: bool, checks: bool
    ) -> None:
        self.packing = packing
        self.half = half
        self.checks = checks  # indices outside are an error
        self.native = native  # ggml's own meaning where it is faster
        self.region = region
        self.declared: set[str] = set()  # operations that run as their declaration

    def reads_packed(self, node: Node, operand: int) -> bool:
        """Whether a node reads the packed or 16-bit form of an operand instead of it."""
        is_half = operand == 1 and id(node) in self.half
        return is_half or (self.packing is not None and self.packing.reads(node, operand))

    def packed(self, draft: ProgramBuilder, node: Node, operand: int) -> Tensor | None:
        """Return the packed or 16-bit form of a weight, or None."""
        packed = self.packing.tensor(node, operand) if self.packing is not None else None
        if packed is None and operand == 1 and id(node) in self.half:
            return draft.dense(draft.values[self.half[id(node)]])
        return packed


def build(
    graph: Graph,
    options: BuildOptions,
    *,
    recipe: QuantizationRecipe | None,
    store: Store,
    threads: int | None,
    limit: int | None,
) -> GGMLExecutable | SizedExecutable:
    """Build the executable of a program."""
    _verified(graph)
    decisions = options.decisions
    declared: set[str] = set()
    native = options.semantics == "native"
    safe = bool(options.checks)

    def make(sized: Graph) -> GGMLExecutable:
        packing = None if recipe is None else Packing.of(sized, recipe, store, decisions)
        program = _program(
            sized,
            packing,
            threads,
            limit,
            declared,
            options.memory_plan,
            native=native,
            safe=safe,
        )
        if declared:
            names = ", ".join(sorted(declared))
            decisions.record("choice", f"computed by NumPy as declared, ggml has nothing better: {names}")
        return program

    lowered = frozenset(node.op.name for node, _ in iterate(graph))
    return make(graph) if is_static(graph) else SizedExecutable(graph, lowered, make)


def _program(
    graph: Graph,
    packing: Packing | None,
    threads: int | None,
    limit: int | None,
    declared: set[str],
    strategy: str | Strategy,
    *,
    native: bool,
    safe: bool = False,
) -> GGMLExecutable:
    regions: list[GGMLExecutable] = []

    def region(node: Node, number: int) -> Callable[[Sequence[Array]], list[Array]]:
        """Build a region as a function of its arguments."""
        packed = packing.inner.get((id(node), number)) if packing is not None else None
        body = node.regions[number]
        memory = _program(body, packed, threads, limit, declared, strategy, native=native, safe=safe)
        regions.append(memory)
        return memory.run

    settings = Settings(packing, half_matrices(graph), region, native, safe)
    draft = ProgramBuilder(graph, settings)
    inputs = [_allocate_input(draft, i) for i in graph.inputs if i.role != "constant"]
    needed = _used_values(graph, settings)
    for i in graph.with_role("constant"):
        if i.value not in needed:  # read packed, or folded into another
            continue
        assert i.data is not None
        draft.values[i.value] = draft.constant_tensor(i.data, i.type.dtype, i.name)
    if packing is not None:
        handed = packing.region_weights(graph)
        for bound, i in zip(inputs, (i for i in graph.inputs if i.role != "constant")):
            bound.raw = i.value in handed
        inputs += packing.place(draft)
    for node in graph.nodes:
        for value in node.results:
            _check_fits_memory(value.name, static(value), value.dtype.itemsize)
        if not any(v in needed for v in node.results):
            continue
        operands = [None if v is None else draft.values.get(v) or _unread(draft, v) for v in node.operands]
        lowering.emit(draft, node, operands)
    declared |= settings.declared
    outputs = [draft.values[v] for v in graph.outputs]
    read = {t.storage for t in outputs}
    inputs = [g for g in inputs if g.tensor.storage.end >= 0 or g.tensor.storage in read]
    own_results(outputs)
    memory = plan(draft, outputs, [g.staged for g in inputs if g.staged is not None], strategy)
    return GGMLExecutable(
        graph,
        draft,
        inputs,
        outputs,
        memory,
        threads=threads,
        limit=limit,
        safe=safe,
        packing=packing,
        regions=sum(r.memory.total for r in regions),
        lowered=frozenset(node.op.name for node, _ in iterate(graph)),
    )


def _verified(graph: Graph) -> None:
    """Verify a handwritten graph; any exception in the rules of its operations is an error of the graph."""
    try:
        verify(graph)
    except MithrilError:
        raise
    except Exception as error:
        raise VerificationError(
            f"graph '{graph.name}' does not fit its operations", facts=[f"{type(error).__name__}: {error}"]
        ) from error


def _check_fits_memory(name: str, shape: tuple[int, ...], itemsize: int) -> None:
    """Reject a value larger than the memory: the process would be killed while filling it."""
    size = math.prod(shape) * itemsize
    if size > machine_memory():
        raise MemoryLimitError(
            f"'{name}' of shape {list(shape)} takes {format_bytes(size)}, "
            f"more than this machine's {format_bytes(machine_memory())}"
        )


def _used_values(graph: Graph, settings: Settings) -> set[Value]:
    """Return the used values; expressions that only served packed weights are dropped."""
    needed = {*graph.outputs, *settings.half.values()}
    for node in reversed(graph.nodes):
        if any(v in needed for v in node.results):
            reads = enumerate(node.operands)
            needed.update(v for k, v in reads if v is not None and not settings.reads_packed(node, k))
    return needed


def _unread(draft: ProgramBuilder, value: Value) -> Tensor:
    """Return a placeholder for a weight that is only read in packed form."""
    return draft.caller_tensor(value.name, static(value), value.dtype)


def _allocate_input(draft: ProgramBuilder, i: Any) -> BoundInput:
    """Allocate an input: small ones are copied into the arena at each call, others are read in place."""
    shape, dtype = static(i.value), i.type.dtype
    _check_fits_memory(i.name, shape, dtype.itemsize)
    size = math.prod(shape) * dtype.itemsize
    if i.role != "param" and size <= STAGED:
        t = draft.new(shape, dtype)
        draft.values[i.value] = t
        return BoundInput(i.name, i.role, t, shape, dtype.numpy, staged=t)
    t = draft.caller_tensor(i.name, shape, dtype)
    draft.values[i.value] = t
    return BoundInput(i.name, i.role, t, shape, dtype.numpy)
