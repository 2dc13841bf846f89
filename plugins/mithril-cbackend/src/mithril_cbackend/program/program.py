"""A graph as a program: kernels, generated once for all equal uses, and one driver that calls them.

The driver is a function of an address table: the arena, inputs, results, constants. Loops and branches of the graph
are loops and branches of the driver. A run allocates no memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mithril.backend import ExactSizesRequired, memory_plan
from mithril.graph import Dim, Graph, Node, Registry, TensorType, Value, dtype as as_dtype, iterate, symbols
from mithril_cbackend import tir as t
from mithril_cbackend.graph.call_layout import ARENA, Layout, at_aligned_address
from mithril_cbackend.graph.fusion import FusionPlan, KnownWeights, Step, captured_weights, captures, group
from mithril_cbackend.lowering.element.element_reader import shape_of, typical
from mithril_cbackend.lowering.element.kernel import Kernel
from mithril_cbackend.lowering.element.kernel_builder import Machine
from mithril_cbackend.lowering.packings import PackedParameter
from mithril_cbackend.program.arena_plan import ArenaPlan, StepOp
from mithril_cbackend.program.host_steps import CALLER, HostStep
from mithril_cbackend.program.kernel_errors import kernel_error_context

DRIVE = "drive"
CONTROL: Registry[Callable[..., None]] = Registry("regions in C")


@dataclass(frozen=True)
class Location:
    """Address of a value: the address in a slot plus ``offset`` bytes, and in a loop ``shift`` bytes more."""

    slot: int
    offset: int = 0
    shift: Any = None

    def address(self, table: t.Buffer) -> t.Expr:
        if self.shift is None:
            return t.address(table, self.slot, self.offset)
        return t.address(table, self.slot, self.shift + t.const(self.offset, "int64"))

    def at(self, offset: int) -> Location:
        return replace(self, offset=self.offset + offset)


@dataclass
class Region:
    """A fused graph with the memory plan of its part of the arena."""

    graph: Graph
    fused: FusionPlan
    direct: dict[Value, int]  # stored value -> index of the result it is written to
    copied: list[tuple[int, Value]]  # results that must be copied: inputs, constants, duplicates
    plan: memory_plan.MemoryPlan
    inner: dict[Node, list[Region]]
    scratch: dict[Node, Value]  # control-flow node -> arena of its regions
    steps: Graph  # the steps as nodes, which the memory plan is computed from
    sizes: frozenset[str]  # symbolic sizes, which are known when the program runs

    @property
    def size(self) -> int:
        return self.plan.size

    def read(self) -> set[Value]:
        """Return the stored values that steps and copies read."""
        read = {v for _, v in self.copied}
        for step in self.fused.steps:
            unread: set[Value] = set()
            if isinstance(step, Step) and step.node.regions:
                unread = captured_unread(step.node, self.inner[step.node])
            read.update(self.fused.stored(v) for v in step.inputs if v not in unread)
        return read


def captured_unread(node: Node, regions: Sequence[Region]) -> set[Value]:
    """Return the weights that regions of a node capture, but of which they only read packed copies."""
    pairs = [(inner, outer, region.read()) for region in regions for inner, outer in captures(node, region.graph)]
    states = node.operands[: len(node.operands) - len(captures(node, regions[0].graph))]
    return {outer for _, outer, _ in pairs} - {outer for inner, outer, read in pairs if inner in read} - {*states}


def region(
    graph: Graph, machine: Machine, strategy: Any = "greedy", captured: Mapping[Value, KnownWeights] | None = None
) -> Region:
    """Fuse a graph and plan its memory, regions first."""
    captured = captured or {}
    fused = group(graph, machine, captured)
    stored_values = {v for step in fused.steps for v in step.outputs}
    direct: dict[Value, int] = {}
    copied: list[tuple[int, Value]] = []
    for k, v in enumerate(graph.outputs):
        stored = fused.stored(v)
        if stored in fused.in_place:
            continue  # written in the memory of the state
        # The kernel writes the result in place of an arena buffer. Of two outputs with one value, and
        # of inputs and constants that are outputs, results are copies: the caller owns each result
        # alone.
        if stored in stored_values and stored not in direct:
            direct[stored] = k
        else:
            copied.append((k, stored))
    inner, scratch, nodes = {}, {}, []
    for step in fused.steps:
        results = [v for v in step.outputs if v not in direct and v not in fused.in_place]
        if isinstance(step, Kernel):
            results += step.scratch
        if isinstance(step, Step):
            inner[step.node] = regions = [
                region(r, machine, strategy, captured_weights(graph, step.node, r, captured)) for r in step.node.regions
            ]
            extra = max((r.size for r in regions), default=0) + loop_state_bytes(step.node)
            scratch[step.node] = Value("room", TensorType(as_dtype("uint8"), (extra,)))
            results.append(scratch[step.node])
        # Views have no memory: their source stays alive as long as they are read.
        read = tuple(dict.fromkeys(fused.stored(v) for v in step.inputs))
        nodes.append(Node(StepOp("step"), read, {}, tuple(results)))  # type: ignore[arg-type]
    last = tuple(v for _, v in copied if v in stored_values and v not in direct)
    end = Node(StepOp("end"), tuple(v for _, v in copied) or last, {}, ())  # type: ignore[arg-type]
    steps = Graph((), (*nodes, end), ())
    sizes = {s.name: typical(Dim(s.name, s.low)) for i in graph.inputs for s in symbols(*i.type.shape)}
    # Regions and copies of symbolic sizes would need addresses and lengths that the driver computes;
    # it only reads them.
    if sizes and (inner or any(symbols(*v.shape) for _, v in copied)):
        reason = "it loops, branches, calls Python functions or returns an input"
        raise ExactSizesRequired(f"the program cannot run any size: {reason}")
    plan = memory_plan.plan(steps, strategy, sizes, views=lambda node: False)
    return Region(graph, fused, direct, copied, plan, inner, scratch, steps, frozenset(sizes))


def aligned(size: int) -> int:
    return -(-size // memory_plan.ALIGNMENT) * memory_plan.ALIGNMENT


def loop_state_bytes(node: Node) -> int:
    """Return the bytes for a loop's next states and condition, in addition to the arenas of its regions."""
    if not node.regions:  # a step that runs on the host: addresses of its operands and results
        return aligned(8 * (len(node.operands) + len(node.results)))
    states = node.attributes.get("states", node.attributes.get("carries", 0))
    return sum(aligned(memory_plan.nbytes(v.type)) for v in node.results[:states]) + memory_plan.ALIGNMENT


@dataclass
class Program:
    """Kernels and driver of a graph, and the layout of the address table."""

    graph: Graph
    functions: dict[str, t.Function]
    driver: Any
    slots: int
    arguments: dict[str, int]
    results: list[tuple[str, int]]
    constants: dict[int, np.ndarray[Any, Any]]
    arena: int
    kernels: dict[str, Kernel] = field(default_factory=dict)
    host_steps: list[HostStep] = field(default_factory=list)
    calls: int = 0
    plan: memory_plan.MemoryPlan | None = None
    sizes: dict[str, int] = field(default_factory=dict)  # slot of each symbolic size
    places: dict[Value, int] = field(default_factory=dict)  # slot of each address that depends on sizes
    steps: Graph | None = None  # from which the memory plan for sizes is computed
    packed: dict[PackedParameter, int] = field(default_factory=dict)  # copies of bound parameters, with their slots
    unread: frozenset[str] = frozenset()  # bound parameters of which only these copies are read

    @property
    def fallbacks(self) -> frozenset[str]:
        """Operations that run as their reference implementation."""
        return frozenset(step.node.op.name for step in self.host_steps if step.is_fallback)

    def arena_plan(self, strategy: Any) -> ArenaPlan:
        """Return the plan of the arena for symbolic sizes."""
        assert self.steps is not None
        stored = {v.shape for k in self.kernels.values() for v in (*k.inputs, *k.outputs) if not v.type.is_static}
        arguments = {i.name: i.type.shape for i in self.graph.arguments if not i.type.is_static}
        return ArenaPlan(self.steps, self.places, arguments, frozenset(stored), strategy)

    def layout(self, graph: Graph) -> Layout:
        """Return the part of the table that calls of a graph read and write."""
        names = {i.value: i.name for i in graph.inputs}
        updated = {v: names[state] for v, state in memory_plan.in_place_updates(graph).items()}
        arguments = [(i, self.arguments[i.name]) for i in graph.arguments]
        return Layout(
            0 if self.sizes else self.arena,
            self.slots,
            [(i.name, slot) for i, slot in arguments if i.role == "param" and i.name not in self.unread],
            [(i.name, slot) for i, slot in arguments if i.role != "param"],
            [
                (name, slot, shape_of(v), v.dtype.name)
                for (name, slot), v in zip(self.results, graph.outputs, strict=True)
                if v not in updated
            ],
            frozenset(node.op.name for node, _ in iterate(graph)) - self.fallbacks,
            self.constants,
            {name: updated[v] for (name, _), v in zip(self.results, graph.outputs, strict=True) if v in updated},
            self.sizes,
            self.packed,
        )


class ProgramEmitter:
    """Generator of the driver and of the kernels it calls."""

    def __init__(self, graph: Graph, machine: Machine, strategy: Any = "greedy") -> None:
        self.graph = graph
        self.machine = machine
        self.code = t.Code()
        self.table = t.pointer("table", "int64")
        self.functions: dict[str, t.Function] = {}
        self.kernels: dict[str, Kernel] = {}
        self.names: dict[str, str] = {}
        self.constants: dict[int, np.ndarray[Any, Any]] = {}
        self.constant_slots: dict[int, int] = {}
        self.packed: dict[PackedParameter, int] = {}  # with their slots
        self.unread: frozenset[str] = frozenset()  # bound parameters of which only packed copies are read
        self.host_steps: list[HostStep] = []
        self.failures: list[BaseException] = []  # of the host steps of one run
        self.calls = 0
        self.slots = 1
        self.top = region(graph, machine, strategy)
        self.sizes = {name: self.slot() for name in sorted(self.top.sizes)}
        self.places: dict[Value, int] = {}

    def slot(self) -> int:
        self.slots += 1
        return self.slots - 1

    def write(self) -> Program:
        arguments = {i.name: self.slot() for i in self.graph.arguments}
        results = [(name, self.slot()) for name in self.graph.output_names]
        inputs = [Location(arguments[i.name]) for i in self.graph.arguments]
        self.emit_calls(self.top, inputs, [Location(s) for _, s in results], Location(ARENA))
        driver = t.function(DRIVE, [self.table], self.code.finish())
        return Program(
            self.graph,
            self.functions,
            driver,
            self.slots,
            arguments,
            results,
            self.constants,
            self.top.size,
            self.kernels,
            self.host_steps,
            self.calls,
            self.top.plan,
            self.sizes,
            self.places,
            self.top.steps,
            self.packed,
            self.unread,
        )

    # -- a region -------------------------------------------------------------------------------------------------
    def emit_calls(self, region: Region, inputs: list[Location], results: list[Location], arena: Location) -> None:
        """Emit the calls of one run of a region."""
        locations: dict[Value, Location] = {}
        for i, address in zip(region.graph.arguments, inputs, strict=True):
            locations[i.value] = address
        read = region.read()
        for i in region.graph.with_role("constant"):
            # Of others only packed copies are read: the address that a region gets for them has no meaning.
            locations[i.value] = Location(self.constant(i.data) if i.value in read else ARENA)
        if region is self.top:
            bound = [i for i in self.graph.with_role("param") if i.tags.get("bound")]
            self.unread = frozenset(i.name for i in bound if i.value not in read)
        for v, buffer in region.plan.buffer_of.items():
            if self.sizes:
                self.places[v] = self.slot()
                locations[v] = Location(self.places[v])
            else:
                locations[v] = arena.at(buffer.offset)
        for v, k in region.direct.items():
            locations[v] = results[k]
        for v, state in region.fused.in_place.items():
            locations[v] = locations[state]

        def location(v: Value) -> Location:
            return locations[region.fused.stored(v)]

        for step in region.fused.steps:
            if isinstance(step, Kernel):
                for v, data in step.prepared.values():
                    slot = self.packed_slot(data) if isinstance(data, PackedParameter) else self.constant(data)
                    locations[v] = Location(slot)
                self.call(step, [location(v) for v in step.parameters])
            else:
                CONTROL.get(step.node.op.name, host_call)(
                    self,
                    step.node,
                    region.inner[step.node],
                    [location(v) for v in step.inputs],
                    [location(v) for v in step.outputs],
                    locations[region.scratch[step.node]],
                )
        for k, v in region.copied:
            self.copy(results[k], locations[v], memory_plan.nbytes(region.graph.outputs[k].type))

    def constant(self, data: Any) -> int:
        # By identity: comparing weights of gigabytes would take longer than storing one twice.
        slot = self.constant_slots.get(id(data))
        if slot is None:
            slot = self.constant_slots[id(data)] = self.slot()
            data = np.asarray(data, order="C")
            # Reading more than the cache holds takes the time of the memory, wherever vectors begin.
            self.constants[slot] = at_aligned_address(data) if data.nbytes <= self.machine.cache else data
        return slot

    def packed_slot(self, packed: PackedParameter) -> int:
        if packed not in self.packed:
            self.packed[packed] = self.slot()
        return self.packed[packed]

    # -- calls ----------------------------------------------------------------------------------------------------
    def call(self, kernel: Kernel, locations: list[Location]) -> None:
        if all(0 in shape_of(v) for v in kernel.outputs):
            return  # nothing to compute
        self.calls += 1
        sizes = [t.cast(t.load(self.table[1], self.sizes[name]), "int32") for name in kernel.sizes]
        self.code.call(self.function(kernel), *[p.address(self.table[1]) for p in locations], *sizes)

    def function(self, kernel: Kernel) -> str:
        """Return the name of the kernel's function, generating it on the first use of an equal kernel."""
        # Layers repeat: LLVM compiles a function once, and the gradients of twelve blocks took 24 s
        # when kernels were copied into the driver (commit f52224ad).
        key = kernel.key()
        name = self.names.get(key)
        if name is None:
            name = self.names[key] = f"k{len(self.names)}_{kernel.name()}"
            with kernel_error_context(kernel):
                function = (kernel.scheduled or kernel.template)(kernel, name, self.machine)
            self.functions |= function.helpers
            self.functions[name] = function
            self.kernels[name] = kernel
        return name

    def copy(self, target: Location, source: Location, size: int) -> None:
        if size and target != source:
            table = self.table[1]
            self.code.call("memcpy", target.address(table), source.address(table), t.const(size, "int64"))

    # -- control flow ---------------------------------------------------------------------------------------------
    def load_condition(self, location: Location) -> t.Expr:
        """Load a bool from its buffer.

        It must not be copied to the table first: LLVM may assume that only the driver's own stores write there.
        """
        condition = self.code.view("condition", "uint8", location.address(self.table[1]))
        return t.not_equal(t.load(condition, 0), t.const(0, "uint8"))


def choose(
    writer: ProgramEmitter,
    node: Node,
    regions: list[Region],
    inputs: list[Location],
    results: list[Location],
    scratch: Location,
) -> None:
    """Emit ``if``: both regions write the same results."""
    condition = writer.load_condition(inputs[0])
    blocks = []
    for region in regions:
        with writer.code.block() as block:
            writer.emit_calls(region, inputs[1:], results, scratch)
        blocks.append(block)
    writer.code.either(condition, *blocks)


def swap_states(writer: ProgramEmitter, states: list[Value], after: list[Location], before: list[Location]) -> None:
    """Copy the next states over the current ones."""
    for v, source, target in zip(states, after, before, strict=True):
        writer.copy(target, source, memory_plan.nbytes(v.type))


def next_states(states: list[Value], scratch: Location) -> tuple[list[Location], Location]:
    """Reserve the beginning of the scratch buffer for the next states, and return the rest of it."""
    locations, offset = [], 0
    for v in states:
        locations.append(scratch.at(offset))
        offset += aligned(memory_plan.nbytes(v.type))
    return locations, scratch.at(offset)


def loop(
    writer: ProgramEmitter,
    node: Node,
    regions: list[Region],
    inputs: list[Location],
    results: list[Location],
    scratch: Location,
) -> None:
    """Emit ``while``: repeat the body as long as the condition holds."""
    count, trips = node.attributes["states"], node.attributes["max_trips"]
    states = list(node.results)
    # The states live in the memory of the results, so that the last step need not copy them there.
    swap_states(writer, states, inputs[:count], results)
    after, rest = next_states(states, scratch)
    holds, arena = rest, rest.at(memory_plan.ALIGNMENT)
    now = [*results, *inputs[count:]]
    code = writer.code
    writer.emit_calls(regions[0], now, [holds], arena)
    condition = writer.load_condition(holds)
    table, trip = writer.table[1], writer.slot() if trips is not None else 0
    if trips is not None:
        code.store(table, trip, t.const(0, "int64"))
        condition = condition & (t.load(table, trip) < t.const(trips, "int64"))
    with code.block() as body:
        writer.emit_calls(regions[1], now, after, arena)
        swap_states(writer, states, after, results)
        writer.emit_calls(regions[0], now, [holds], arena)
        if trips is not None:
            code.store(table, trip, t.load(table, trip) + t.const(1, "int64"))
    code.repeat(condition, body)


def scan(
    writer: ProgramEmitter,
    node: Node,
    regions: list[Region],
    operands: list[Location],
    results: list[Location],
    scratch: Location,
) -> None:
    """Emit ``scan``: one run of the body per step, which reads and writes rows of the stacked arrays."""
    a = node.attributes
    carries, sequences, length = a["carries"], a["sequences"], int(a["length"])
    states = list(node.results[:carries])
    swap_states(writer, states, operands[:carries], results[:carries])
    if length == 0:
        return
    after, rest = next_states(states, scratch)
    body = regions[0]
    with writer.code.loop("step", length) as step:
        index = length - 1 - step if a["reverse"] else step

        def row(location: Location, v: Value) -> Location:
            size = memory_plan.nbytes(v.type)
            if size == 0 or isinstance(index, int):
                return location.at(size * index if isinstance(index, int) else 0)
            shift = t.cast(t.index(index), "int64") * t.const(size, "int64")
            return replace(location, shift=shift if location.shift is None else location.shift + shift)

        inputs = body.graph.arguments
        elements = [row(operands[carries + k], inputs[carries + k].value) for k in range(sequences)]
        stacked = [row(results[k], body.graph.outputs[k]) for k in range(carries, len(results))]
        writer.emit_calls(
            body, [*results[:carries], *elements, *operands[carries + sequences :]], [*after, *stacked], rest
        )
        swap_states(writer, states, after, results[:carries])


def host_call(
    writer: ProgramEmitter,
    node: Node,
    regions: list[Region],
    inputs: list[Location],
    results: list[Location],
    scratch: Location,
) -> None:
    """Emit a call of a Python function with a pointer to the addresses of its operands and results."""
    step = HostStep(node, writer.failures)
    writer.host_steps.append(step)
    code, table = writer.code, writer.table[1]
    words = code.view("words", "int64", scratch.address(table))
    for k, location in enumerate((*inputs, *results)):
        code.store(words, k, t.pointer_to_int(location.address(table)))
    slot = writer.slot()
    writer.constants[slot] = np.array([step.address], np.int64)
    function = code.view("function", "int64", Location(slot).address(table))
    one = t.const(1, "int64")
    code.call(CALLER, scratch.address(table), scratch.address(table), one, one, t.int_to_pointer(t.load(function, 0)))


for _name, _drive in (("if", choose), ("while", loop), ("scan", scan)):
    CONTROL(_name)(_drive)


def write(graph: Graph, machine: Machine, strategy: Any = "greedy") -> Program:
    return ProgramEmitter(graph, machine, strategy).write()


def elements(program: Program) -> int:
    """Return the number of elements of the largest stored value; its indices must fit 32 bits."""
    values = [v for k in program.kernels.values() for v in (*k.inputs, *k.outputs)]
    return max((math.prod(shape_of(v)) for v in values), default=0)
