"""Fusion: split the graph of a region into steps, each a kernel or a control-flow node.

Nodes are visited from last to first. A node whose elements depend only on elements of its operands is fused into its
kernel if it has only one; values used by two kernels are stored, and constants are recomputed in each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from mithril import ops
from mithril.backend import memory_plan
from mithril.graph import DType, Graph, Node, TensorType, Value, dtype as as_dtype
from mithril_cbackend.graph.call_layout import at_aligned_address
from mithril_cbackend.graph.foreign import is_primitive, plugin_lowering, plugin_template
from mithril_cbackend.graph.index_ranges import IndexRanges
from mithril_cbackend.lowering.attention import attention, attention_match
from mithril_cbackend.lowering.attention.attention_match import Attention
from mithril_cbackend.lowering.conv import byte_convolution, direct_convolution
from mithril_cbackend.lowering.element import elementwise, scatter, vectorization
from mithril_cbackend.lowering.element.element_reader import RULES, is_uniform, operand, shape_of, typical
from mithril_cbackend.lowering.element.kernel import LOWERINGS, Kernel
from mithril_cbackend.lowering.element.kernel_builder import Machine
from mithril_cbackend.lowering.element.views import view
from mithril_cbackend.lowering.matmul import (
    expert_products,
    group_products,
    group_rows,
    matmul,
    matmul_form,
    sparse_products,
)
from mithril_cbackend.lowering.packings import Array, Pack, PackedParameter, Packing
from mithril_cbackend.lowering.pool import byte_pooling, pooling
from mithril_cbackend.lowering.rows import cumulative, fused_rows, reductions, sorting
from mithril_cbackend.lowering.scheduled import families

# A run of a gather gets its loop from half a vector of AVX-512 on, and LLVM compiles each loop, so that many short runs
# stay a gather. Estimates, not tuned.
MIN_RUN = 8  # positions
MAX_RUNS = 8

FAMILIES = (
    byte_convolution,
    byte_pooling,
    cumulative,
    direct_convolution,
    expert_products,
    group_products,
    group_rows,
    matmul,
    pooling,
    reductions,
    scatter,
    sorting,
    sparse_products,
)

__all__ = ["FAMILIES", "LOWERINGS"]


def lowers(node: Node) -> bool:
    """Whether this backend computes the node with a kernel, or its regions in the driver."""
    if node.op in expert_products.OPERATIONS and not expert_products.is_supported(node):
        return False
    if node.op in sparse_products.OPERATIONS and not sparse_products.is_supported(node):
        return False
    return bool(node.regions) or node.op.name in LOWERINGS or node.op.name in RULES


def is_lowered(node: Node) -> bool:
    """Whether this backend or a plugin provides a lowering of the node."""
    return plugin_lowering(node) is not None or lowers(node)


def runs_on_host(node: Node) -> bool:
    """Whether the node calls back into Python: a plugin kernel on arrays, or the reference implementation."""
    if plugin_lowering(node) is not None:
        return plugin_template(node) is None
    return not lowers(node) and is_primitive(node)


@dataclass(eq=False)
class Step:
    """A node that the driver runs: control flow, or a call back into Python."""

    node: Node

    @property
    def outputs(self) -> list[Value]:
        return list(self.node.results)

    @property
    def inputs(self) -> list[Value]:
        return [v for v in self.node.operands if v is not None]


@dataclass
class FusionPlan:
    """Steps in order, and the value that each view aliases."""

    steps: list[Kernel | Step]
    views: dict[Value, Value] = field(default_factory=dict)
    in_place: dict[Value, Value] = field(default_factory=dict)

    def stored(self, value: Value) -> Value:
        """Return the value whose buffer `value` aliases."""
        while value in self.views:
            value = self.views[value]
        return value


def size(value: Value) -> int:
    return typical(math.prod(shape_of(value)))


class FusionPlanner:
    def __init__(self, graph: Graph, machine: Machine, captured: Mapping[Value, KnownWeights]) -> None:
        self.graph = graph
        self.machine = machine
        self.captured = captured
        self.ranges = IndexRanges(graph)
        self.users: dict[Value, list[Kernel | None]] = {}  # None: must be stored
        self.steps: list[Kernel | Step] = []
        self.views: dict[Value, Value] = {}
        self.expanded: dict[Kernel, int] = {}
        self.in_place = memory_plan.in_place_updates(graph)  # next state -> the state that it overwrites
        self.attentions: dict[Node, tuple[Attention, tuple[Node, ...]]] = {}  # last node -> attention and its epilogue
        self.attention_nodes: set[Node] = set()  # nodes of all matched attentions
        if machine.fuse and not machine.launches:
            self._find_attentions()

    def _find_attentions(self) -> None:
        for node in self.graph.nodes:
            attention_pattern = (
                attention_match.attention_of(self.graph.producers, node) if node.op is ops.matmul else None
            )
            chain = (
                None
                if attention_pattern is None
                else attention_match.trailing_layout_ops(self.graph, attention_pattern)
            )
            # A plugin's lowering of one of these operations would be bypassed by a kernel that computes
            # them all.
            if attention_pattern is not None and any(plugin_lowering(n) for n in (*attention_pattern.inner, node)):
                continue
            if attention_pattern is not None and chain is not None:
                kernel = self._attention_kernel(attention_pattern, chain)
                if not self._fits(attention.scratch, kernel):
                    continue
                self.attentions[chain[-1] if chain else node] = attention_pattern, chain
                self.attention_nodes.update(attention_pattern.inner, [node], chain)

    def run(self) -> FusionPlan:
        for v in self.graph.outputs:
            self._add_user(v, None)
        # From last to first: the kernels that read a node exist when it is assigned, so the decision
        # needs no second pass.
        for node in reversed(self.graph.nodes):
            self._assign(node)
        self.steps.reverse()
        for step in self.steps:
            if isinstance(step, Kernel):
                if step.template in self.machine.templates:
                    step.template, step.scratch = self.machine.templates[step.template], []
                step.read_stored()
                step.in_bounds = frozenset(n for n in step.nodes if self.ranges.within_bounds(n))
                step.runs = {n: runs for n in step.nodes if (runs := self._runs(n))}
                if step.template is attention.attention:
                    step.scratch = attention.scratch(step, self.machine)
                if step.template is fused_rows.rows:
                    step.scratch = fused_rows.scratch(step, self.machine)
                if step.template is matmul.matmul:
                    step.scratch = matmul.scratch(step, self.machine)
                step.scheduled, step.unscheduled = families.choice(step, self.machine)
                if step.scheduled is not None:
                    step.scratch = []
        return FusionPlan(self.steps, self.views, self.in_place)

    def _runs(self, node: Node) -> tuple[tuple[int, int, int], ...]:
        """Return the runs of neighbors that a gather at constant positions reads; none if they are few of them."""
        source = self.graph.input_of.get(operand(node, 1)) if node.op is ops.take else None
        size = shape_of(operand(node))[node.attributes["axis"]] if source is not None else None
        if source is None or source.role != "constant" or source.value.ndim != 1 or not isinstance(size, int):
            return ()
        positions = np.asarray(source.data, np.int64)
        positions = np.clip(np.where(positions < 0, positions + size, positions), 0, size - 1)
        first = np.flatnonzero(np.diff(positions, prepend=-2) != 1)
        sizes = np.diff(first, append=len(positions))
        runs = [(int(k), int(n), int(positions[k])) for k, n in zip(first, sizes, strict=True) if n >= MIN_RUN]
        covered = sum(n for _, n, _ in runs)
        return tuple(runs) if 2 * covered >= len(positions) and len(runs) <= MAX_RUNS else ()

    def _add_user(self, value: Value | None, by: Kernel | None) -> None:
        if value is not None:
            users = self.users.setdefault(value, [])
            if by not in users:
                users.append(by)

    def _assign(self, node: Node) -> None:
        readers = [self.users.get(v, []) for v in node.results]
        if not any(readers):
            return  # dead
        # The order of the branches is part of the result: nodes that need stored values come first,
        # since no fusion may swallow them; then kernels that compute a whole pattern; then views, which
        # cost nothing; fusion into one reader comes last, and a kernel of its own is what remains.
        name = node.op.name
        # Python reads arrays: every operand must be in memory, whatever kernel computes it.
        if runs_on_host(node):
            for v in node.operands:
                self._add_user(v, None)
            self.steps.append(Step(node))
        elif (template := plugin_template(node)) is not None:
            self.steps.append(Kernel(template, [node], list(node.results), node, kind=template.__name__))
            for v in node.operands:
                self._add_user(v, None)  # the template reads stored values
        # Nodes are visited backwards, so the last node of the pattern comes first; the attention kernel
        # is made there, and its other nodes must not become kernels again.
        elif node in self.attentions:
            self._add_attention(*self.attentions[node])
        elif node in self.attention_nodes:
            return
        # The driver runs branches and loops and gives the regions addresses; they cannot read a value
        # that is only computed within another kernel.
        elif node.regions:
            for v in node.operands:
                self._add_user(v, None)
            self.steps.append(Step(node))
        # A barrier orders operations and a reshape renames positions: neither moves elements, so the
        # result is the memory of the operand. A reshape that lets its producer join the reader is fused
        # instead, since a view forces a store.
        elif node.op is ops.barrier or (node.op is ops.reshape and not self._is_fused_reshape(node)):
            for source, result in zip(node.operands, node.results, strict=True):
                assert source is not None
                self.views[result] = source
                self._add_user(source, None)
        # Operand 0 is the state whose memory the update overwrites. The kernel must not read it, or it
        # would become an input that has to stay alive with the result.
        elif node.results[0] in self.in_place:
            update = self._update_kernel(node)
            self.steps.append(update)
            for v in node.operands[1:]:
                self._add_user(v, update)
        # One number for all elements: computing it again in each reader is cheaper than a load from a
        # stored array.
        elif is_uniform(node):
            for reader in readers[0]:
                if reader is None:
                    self._separate_kernel(node)
                else:
                    reader.nodes.insert(0, node)
        # Products convert while they pack, so that the wide copy would be written and read for nothing;
        # each product repeats the cast. With another kind of reader the wide elements are stored once.
        elif self._widens_for_products(node, readers[0]):
            for reader in readers[0]:
                assert reader is not None
                reader.nodes.insert(0, node)
                self._add_user(operand(node), reader)
        # Before element-wise fusion: a value per row (a sum, its root) that joined as an element would
        # be computed again for each element of its row.
        elif (kernel := self._fuse_into_rows(node, readers[0])) is not None:
            kernel.nodes.insert(0, node)
            kernel.template, kernel.kind = fused_rows.rows, fused_rows.rows.__name__
            for v in node.operands:
                self._add_user(v, kernel)
        elif name in RULES and (kernel := self._fuse_consumer(node, readers[0])) is not None:
            kernel.nodes.insert(0, node)
            for v in node.operands:
                self._add_user(v, kernel)
        # After the attempt to join a reader, because a product or reduction cannot be computed within
        # another loop: here the reader joins it instead, as its epilogue, while the tile is in
        # registers.
        elif (kernel := self._fuse_producer(node, readers[0])) is not None:
            kernel.nodes.insert(0, node)
            kernel.anchor, kernel.template = node, LOWERINGS[name].template
            self._anchor_inputs(kernel)
        else:
            self._separate_kernel(node)

    @staticmethod
    def _update_kernel(node: Node) -> Kernel:
        """Return the kernel that writes a slice into a state, which it does not read."""
        update = node.replaced(operands=(None, *node.operands[1:]))
        template = elementwise.update_in_place
        return Kernel(template, [update], list(node.results), update, kind=template.__name__)

    def _widens_for_products(self, node: Node, readers: list[Kernel | None]) -> bool:
        """Whether to repeat a cast without loss in each of several products, which read the narrow elements."""
        if not self.machine.fuse or len(readers) < 2 or node.op is not ops.cast or not fuses_into_matmul_operand(node):
            return False
        kernels = [k for k in readers if k is not None and reads_narrow(k) and feeds_only(k, node)]
        return len(kernels) == len(readers)

    def _fuse_producer(self, node: Node, readers: list[Kernel | None]) -> Kernel | None:
        """Return the element-wise kernel that can become the epilogue of the node, or None if there is none."""
        if not self.machine.fuse or not is_producer(node) or len(readers) != 1 or readers[0] is None:
            return None
        kernel, result = readers[0], node.result
        if kernel.template is not elementwise.elementwise or shape_of(kernel.outputs[0]) != shape_of(result):
            return None
        if not self._binds(node, kernel):
            return None
        depends = {result}
        for other in kernel.nodes:
            if any(v in depends for v in other.operands):
                if not vectorization.is_plain(other) or shape_of(other.result) != shape_of(result):
                    return None
                depends.add(other.result)
        return kernel

    def _fuse_into_rows(self, node: Node, readers: list[Kernel | None]) -> Kernel | None:
        """Return the row kernel that can compute the node, a value per row, or None if there is none."""
        if not self.machine.fuse or len(readers) != 1 or readers[0] is None or not fused_rows.is_of_rows(node):
            return None
        kernel, result = readers[0], node.result
        shape = shape_of(kernel.outputs[0])
        if (
            kernel.template not in (elementwise.elementwise, fused_rows.rows)
            or not shape
            # Rows shorter than a vector would leave its lanes empty in every pass; separate kernels
            # vectorize over rows.
            or (isinstance(shape[-1], int) and shape[-1] < self.machine.lanes())
        ):
            return None
        if (
            shape_of(result) != (*shape[:-1], 1)
            or not result.dtype.is_float
            or any(shape_of(v) != shape for v in kernel.outputs)
        ):
            return None
        if node.op in reductions.FOLDS:
            source = node.operands[0]
            assert source is not None
            if shape_of(source) != shape or node.attributes["axis"] != (len(shape) - 1,):
                return None
        depends = {result}
        for other in kernel.nodes:
            if any(v in depends for v in other.operands):
                fits = shape_of(other.result) in (shape, shape_of(result))
                if not fits or not fused_rows.is_of_rows(other):
                    return None
                depends.add(other.result)
        if not self._binds(node, kernel):
            return None
        return kernel if self._fits(fused_rows.scratch, replace(kernel, nodes=[node, *kernel.nodes])) else None

    def _is_fused_reshape(self, node: Node) -> bool:
        """Whether to fuse a reshape rather than make it a view, so that its producer can be fused as well."""
        source = node.operands[0]
        assert source is not None
        producer = self.graph.producers.get(source)
        if (
            producer is None
            or producer.op.name not in RULES
            or producer.op in (ops.reshape, ops.barrier)
            or is_uniform(producer)
        ):
            return False
        return affine_reshape(shape_of(node.result), shape_of(source)) and (
            self._fuse_consumer(node, self.users.get(node.result, [])) is not None
        )

    def _fuse_consumer(self, node: Node, readers: list[Kernel | None]) -> Kernel | None:
        """Return the kernel that can compute the node where it reads the result, or None if there is none."""
        if not self.machine.fuse or len(readers) != 1 or readers[0] is None:
            return None
        kernel = readers[0]
        anchor = kernel.anchor
        if not self._binds(node, kernel):
            return None
        # An element of the outer one would read all operands of the inner one, for each of its operands.
        if node.op is ops.concat and is_joined_again(kernel, node):
            return None
        if kernel.template is attention.attention:
            return self._fuse_into_attention(node, kernel)
        lowering = LOWERINGS.get(anchor.op.name)
        if lowering is not None:
            # Transposes and casts without loss cost nothing while an operand is packed; anything else
            # would be repeated for each packed block, so that only products with a packing step accept
            # these two.
            if reads_narrow(kernel) and fuses_into_matmul_operand(node) and feeds_only(kernel, node):
                return kernel
            # The epilogue runs once per element, so a term is computed exactly as often there as in a
            # kernel of its own.
            if lowering.computes_terms and is_term(kernel, node):
                return kernel
            if not lowering.reads_once or (len(kernel.nodes) > 1 and kernel.outputs != [anchor.result]):
                return None
        # The result of an update is the whole state: relative to it each node looks small and recomputed,
        # although the kernel only writes a slice.
        if kernel.template is elementwise.update_in_place:
            return kernel
        source = anchor.operands[0] if lowering is not None else anchor.result
        assert source is not None
        # Here the reader broadcasts the result, so that a fused node is computed again for every
        # element. An expensive one is stored; of cheap ones a few are, since they cost less than a pass
        # over memory. The limit of 6 is that of the first version of this file; no measurement of it is
        # recorded.
        if size(source) > size(node.result):  # elements would be recomputed
            if self.machine.is_expensive(node) or self.expanded.get(kernel, 0) >= 6:
                return None
            self.expanded[kernel] = self.expanded.get(kernel, 0) + 1
        return kernel

    def _fits(self, scratch: Callable[[Kernel, Machine], list[Value]], kernel: Kernel) -> bool:
        """Whether the scratchpad of each thread holds the buffers of a kernel."""
        limit = self.machine.scratchpad
        if limit is None:
            return True
        return sum(size(v) * v.dtype.bits // 8 for v in scratch(kernel, self.machine)) <= limit * self.machine.threads

    def _binds(self, node: Node, kernel: Kernel) -> bool:
        """Whether the device can bind the arrays of a kernel that also computes the node."""
        if self.machine.buffers is None:
            return True
        nodes = [node, *kernel.nodes]
        inner = {v for n in nodes for v in n.results}
        read = {v for n in nodes for v in n.operands if v is not None and v not in inner}
        producers = self.graph.producers
        stored = [v for v in read if v not in producers or not is_uniform(producers[v])]
        return len(stored) + len(kernel.outputs) + len(kernel.scratch) <= self.machine.buffers

    def _attention_kernel(self, pattern: Attention, chain: tuple[Node, ...]) -> Kernel:
        """Return the kernel of an attention, including mask conditions that depend only on positions."""
        producers = self.graph.producers
        conditions = attention_match.position_nodes(
            producers, [operand(n) for n in pattern.between if n.op is ops.where]
        )
        # The zero that a guard selects for fully masked rows is a node before the queries; outside of
        # the kernel it would have to be stored and read for each score.
        zero = [producers[operand(n, 1)] for n in pattern.guard if n.op is ops.where]
        nodes = [*pattern.inner, pattern.second, *chain, *conditions, *zero]
        last = chain[-1] if chain else pattern.second
        return Kernel(attention.attention, nodes, [last.result], pattern.second, kind=attention.attention.__name__)

    def _add_attention(self, pattern: Attention, chain: tuple[Node, ...]) -> None:
        kernel = self._attention_kernel(pattern, chain)
        self.steps.append(kernel)
        inner_values = {n.result for n in kernel.nodes}
        for node in kernel.nodes:
            for v in node.operands:
                if v not in inner_values:
                    self._add_user(v, kernel)

    def _fuse_into_attention(self, node: Node, kernel: Kernel) -> Kernel | None:
        """Fuse an operand transpose, a per-query value or a cheap per-score operation into an attention kernel."""
        pattern = attention_match.attention_of(kernel.producers, kernel.anchor)
        assert pattern is not None
        roles = attention_match.roles(kernel, pattern, node.result)
        sources = [self.graph.producers.get(v) for v in node.operands if v is not None]
        # Heads are read in place: a split of heads is a reshape and a transpose, which strides of
        # the loads represent. A reshape alone is a view already.
        if node.op in (ops.transpose, ops.reshape) and roles in ({"matrix"}, {"query"}):
            is_transposed = node.op is ops.transpose or any(m is not None and m.op is ops.transpose for m in sources)
            producers = {node.result: node, **kernel.producers}
            read = (operand(pattern.first), operand(pattern.first, 1), operand(pattern.second, 1))
            return kernel if is_transposed and None not in [view(producers, v) for v in read] else None
        if any(producer is not None and is_producer(producer) for producer in sources):
            return None  # cheaper as the epilogue of the producer's kernel
        # The loops over scores are vectors; an operation that calls the C library would turn them into
        # scalar loops.
        if node.op is ops.reshape or not vectorization.vectorizable([node]):
            return None
        return kernel if roles == {"query"} or (roles == {"score"} and not self.machine.is_expensive(node)) else None

    def _separate_kernel(self, node: Node) -> None:
        lowering = LOWERINGS.get(node.op.name)
        template = elementwise.elementwise if lowering is None else lowering.template
        kernel = Kernel(template, [node], [v for v in node.results if self.users.get(v)], node)
        self.steps.append(kernel)
        self._anchor_inputs(kernel)

    def _anchor_inputs(self, kernel: Kernel) -> None:
        """Collect the inputs of the anchor's template: scratch buffers, packed constants, plain operands."""
        node = kernel.anchor
        lowering = LOWERINGS.get(node.op.name)
        kernel.kind = kernel.template.__name__
        if lowering is not None and lowering.packing is not None and not self.machine.launches:
            kernel.narrow = narrow_dtype(self.graph, operand(node))
            right = operand(node, 1)
            weights = known_weights(self.graph, right, node.op in (ops.matmul, ops.dot, ops.conv), self.captured)
            if weights is not None and weights.parameter is not None and has_plan_by_size(node):
                weights = None  # packed kernels suit one plan
            pack = None if weights is None else lowering.packing(kernel, weights.elements, self.machine)
            if weights is not None and pack is not None:
                packed = pack(weights.elements)
                value = Value("packed_blocks", TensorType(as_dtype(packed.dtype), packed.shape))
                kernel.prepared = {right: (value, weights.packed_later(pack) or at_aligned_address(packed))}
        if lowering is not None and lowering.scratch is not None and kernel.template not in self.machine.templates:
            kernel.scratch = lowering.scratch(kernel, self.machine)
        for k, v in enumerate(node.operands):
            if k == 0 or v not in kernel.prepared:
                self._add_user(v, kernel)


def is_producer(node: Node) -> bool:
    lowering = LOWERINGS.get(node.op.name)
    return lowering is not None and lowering.is_producer


def has_plan_by_size(node: Node) -> bool:
    """Whether a convolution of images of open sizes selects its plan when it runs."""
    return node.op is ops.conv and not operand(node).type.is_static


def is_joined_again(kernel: Kernel, node: Node) -> bool:
    """Whether a kernel joins a joined value along another axis, or after other operations."""
    depends = {node.result}
    for other in kernel.nodes:
        if any(v in depends for v in other.operands):
            is_same_axis = other.attributes.get("axis") == node.attributes["axis"]
            if other.op is ops.concat and not (node.result in other.operands and is_same_axis):
                return True
            depends.update(other.results)
    return False


def reads_narrow(kernel: Kernel) -> bool:
    """Whether the template converts narrow operands as it reads them."""
    return kernel.template is matmul.matmul


def is_term(kernel: Kernel, node: Node) -> bool:
    """Whether an element-wise node has an element for each one that the epilogue of a kernel computes."""
    is_operand = node.result in kernel.anchor.operands
    return (
        vectorization.is_plain(node) and shape_of(node.result) in ((), shape_of(kernel.outputs[0])) and not is_operand
    )


def feeds_only(kernel: Kernel, node: Node) -> bool:
    """Whether a kernel uses the node's result only to compute operands of its anchor."""
    before = dict.fromkeys(kernel.anchor.operands, kernel.anchor)
    for other in reversed(kernel.nodes):
        if any(v in before for v in other.results):
            before.update(dict.fromkeys(other.operands, other))
    on_the_way = {kernel.anchor, *before.values()}
    return node.result in before and all(o in on_the_way for o in kernel.nodes if node.result in o.operands)


def fuses_into_matmul_operand(node: Node) -> bool:
    """Whether a matmul can apply the node while it packs its operand."""
    if node.op is ops.cast:
        source = node.operands[0]
        assert source is not None
        return matmul_form.is_lossless_cast(source.dtype, node.result.dtype)
    return node.op is ops.transpose


def narrow_dtype(graph: Graph, value: Value) -> DType:
    """Return the dtype of a value before casts without loss."""
    producer = graph.producers.get(value)
    if producer is not None and fuses_into_matmul_operand(producer):
        return narrow_dtype(graph, operand(producer))
    return value.dtype


@dataclass(frozen=True)
class KnownWeights:
    """The elements of a constant, reshaped and transposed; zeros represent those of a parameter that is bound later."""

    elements: Array
    shape: tuple[int, ...]  # of the constant or parameter, reshaped
    axes: tuple[int, ...]  # the axes of this shape, in the order of the elements
    parameter: str | None = None

    def packed_later(self, pack: Pack) -> PackedParameter | None:
        """Return the copy to make when the parameter is bound, None for a constant."""
        if self.parameter is None:
            return None
        assert isinstance(pack, Packing)  # others pack bytes, which only constants are
        return PackedParameter(self.parameter, self.shape, self.axes, pack)


def known_weights(
    graph: Graph, value: Value, casts: bool = False, captured: Mapping[Value, KnownWeights] | None = None
) -> KnownWeights | None:
    """Return a constant or bound parameter, or its transpose or reshape; None if the value is neither.

    With ``casts``, also a narrower one that is converted without loss. ``captured`` has those that a region captures.
    """
    if captured and value in captured:
        return captured[value]
    producer = graph.producers.get(value)
    if producer is not None and producer.op is ops.transpose:
        weights = known_weights(graph, operand(producer), casts, captured)
        if weights is None:
            return None
        order = producer.attributes["perm"]
        return replace(weights, elements=weights.elements.transpose(order), axes=tuple(weights.axes[k] for k in order))
    if producer is not None and producer.op is ops.reshape:
        weights = known_weights(graph, operand(producer), casts, captured)
        shape = shape_of(value)
        if weights is None or weights.axes != tuple(range(weights.elements.ndim)):
            return None
        return replace(weights, elements=weights.elements.reshape(shape), shape=shape, axes=tuple(range(len(shape))))
    if casts and producer is not None and producer.op is ops.cast and fuses_into_matmul_operand(producer):
        return known_weights(graph, operand(producer), casts, captured)
    source = graph.input_of.get(value)
    if source is None:
        return None
    shape, axes = shape_of(value), tuple(range(value.ndim))
    if source.role == "constant":
        return KnownWeights(np.asarray(source.data), shape, axes)
    if not source.tags.get("bound") or not value.dtype.is_float or not value.type.is_static:
        return None
    return KnownWeights(np.broadcast_to(np.zeros((), value.dtype.numpy), shape), shape, axes, source.name)


def captures(node: Node, region: Graph) -> list[tuple[Value, Value]]:
    """Return the operands of a node that every run of its region reads: the region's input, and the operand."""
    attributes, inputs = node.attributes, region.arguments
    states = attributes.get("states", attributes.get("carries", 0) + attributes.get("sequences", 0))
    operands = node.operands[len(node.operands) - len(inputs) + states :]
    return [(i.value, v) for i, v in zip(inputs[states:], operands, strict=True) if v is not None]


def captured_weights(
    graph: Graph, node: Node, region: Graph, captured: Mapping[Value, KnownWeights]
) -> dict[Value, KnownWeights]:
    """Return the weights that a region captures, by the region's inputs."""
    weights = {inner: known_weights(graph, v, captured=captured) for inner, v in captures(node, region)}
    return {inner: w for inner, w in weights.items() if w is not None}


def affine_reshape(shape: tuple[int, ...], target_shape: tuple[int, ...]) -> bool:
    """Whether indices of ``shape`` map to indices of ``target_shape`` by sums and products only."""
    if 0 in shape:
        return False
    a = b = 0
    while a < len(shape) or b < len(target_shape):
        first = b
        m = n = 1
        started = False
        while m != n or not started:
            if started and a == len(shape) and b == len(target_shape):
                return False  # symbols of two inputs, which are equal by a guard
            started = True
            if (typical(m) <= typical(n) and a < len(shape)) or b == len(target_shape):
                m *= shape[a]
                a += 1
            else:
                n *= target_shape[b]
                b += 1
        if sum(k != 1 for k in target_shape[first:b]) > 1:
            return False
    return True


def group(graph: Graph, machine: Machine, captured: Mapping[Value, KnownWeights] | None = None) -> FusionPlan:
    """Plan the steps of a graph; those of a region may pack the weights that it captures."""
    return FusionPlanner(graph, machine, captured or {}).run()
