"""A graph as a program of a device: launches, copies and calls of the host, over numbered buffers.

The host runs the steps in order. Loops and branches of the graph read their condition back; everything else stays in
the memory of the device. A buffer is used again for later values once no step reads its value any more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mithril import ops
from mithril.backend import memory_plan
from mithril.graph import Graph, Node, UnsupportedError, Value
from mithril_cbackend.devices.launches import Launch, launches
from mithril_cbackend.devices.model import DeviceMachine
from mithril_cbackend.graph.fusion import FusionPlan, group
from mithril_cbackend.lowering.element.element_reader import shape_of
from mithril_cbackend.lowering.element.kernel import Kernel
from mithril_cbackend.program.kernel_errors import kernel_error_context

LARGEST = 1 << 31  # elements of a value, whose positions have 31 bits


@dataclass(frozen=True)
class Run:
    """A launch with its buffers."""

    launch: int
    buffers: tuple[int, ...]


@dataclass(frozen=True)
class Copy:
    """A copy of bytes; positions move by a stride for each step of the loop around it, the last one first."""

    source: int
    target: int
    size: int
    source_stride: int = 0
    target_stride: int = 0


@dataclass(frozen=True)
class Call:
    """A node that runs as a function of NumPy arrays."""

    node: Node
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class Branch:
    condition: int
    yes: tuple[Any, ...]
    no: tuple[Any, ...]


@dataclass(frozen=True)
class Loop:
    """Repeat while the condition holds, which ``test`` computes, at most ``trips`` times."""

    condition: int
    test: tuple[Any, ...]
    body: tuple[Any, ...]
    trips: int | None


@dataclass(frozen=True)
class Count:
    """Repeat a number of times, forwards or in reverse."""

    length: int
    body: tuple[Any, ...]
    reverse: bool


@dataclass
class DeviceProgram:
    """Steps with their launches; buffers of temporaries, constants, arguments and results."""

    graph: Graph
    launches: list[Launch] = field(default_factory=list)
    steps: list[Any] = field(default_factory=list)
    sizes: dict[int, int] = field(default_factory=dict)  # bytes of temporaries, by number of the buffer
    constants: dict[int, tuple[Value, Any]] = field(default_factory=dict)
    arguments: dict[str, int] = field(default_factory=dict)
    results: dict[str, int] = field(default_factory=dict)
    updated: dict[str, str] = field(default_factory=dict)  # result -> the state in whose memory it is written
    calls: list[Node] = field(default_factory=list)
    kernels: dict[str, Kernel] = field(default_factory=dict)
    buffers: int = 0

    @property
    def fallbacks(self) -> frozenset[str]:
        return frozenset(node.op.name for node in self.calls)


def with_short_concatenations(graph: Graph, count: int) -> Graph:
    """Return the graph with concatenations of at most this many values; longer ones become trees."""
    long = [n for n in graph.nodes if n.op is ops.concat and len(set(n.operands)) > count]
    if not long:
        return graph
    editor = graph.edit()
    for node in long:
        parts = list(node.operands)
        with editor.before(node):
            while len(parts) > 1:
                rows = [parts[k : k + count] for k in range(0, len(parts), count)]
                parts = [row[0] if len(row) == 1 else ops.concat(*row, **node.attributes) for row in rows]
        editor.replace_value(node.result, parts[0])
        editor.erase_dead(node)
    shortened: Graph = editor.freeze()
    return shortened


class Emitter:
    """Generator of the steps and launches."""

    def __init__(self, graph: Graph, machine: DeviceMachine, reuses: bool = True) -> None:
        self.machine, self.reuses = machine, reuses
        self.program = DeviceProgram(graph)
        self.numbers: dict[str, tuple[int, ...]] = {}  # launches by the key of their kernel
        self.free: list[int] = []
        self.constants: dict[int, int] = {}

    def write(self) -> DeviceProgram:
        graph, program = self.program.graph, self.program
        names = {i.value: i.name for i in graph.inputs}
        states = {v: names[state] for v, state in memory_plan.in_place_updates(graph).items()}
        locations: dict[Value, int] = {}
        for i in graph.arguments:
            program.arguments[i.name] = locations[i.value] = self.number()
        for name, v in zip(graph.output_names, graph.outputs, strict=True):
            if v in states:
                program.updated[name] = states[v]
            else:
                program.results[name] = self.number()
        targets = [program.results.get(name) for name in graph.output_names]
        program.steps = self.region(graph, locations, targets)
        return program

    # -- buffers ------------------------------------------------------------------------------------------------------
    def number(self) -> int:
        self.program.buffers += 1
        return self.program.buffers - 1

    def bytes_of(self, value: Value) -> int:
        elements: int = math.prod(shape_of(value))
        if elements >= LARGEST:
            raise UnsupportedError(f"cannot compile for a device: %{value.name} has 2**31 elements or more")
        return elements * np.dtype(self.machine.model.storage(value.dtype)).itemsize

    def take(self, size: int) -> int:
        """Return a buffer of at least this many bytes: the smallest free one that fits, else the largest, enlarged."""
        sizes = self.program.sizes
        fitting = [b for b in self.free if sizes[b] >= size]
        if not self.free:
            buffer = self.number()
            sizes[buffer] = size
            return buffer
        buffer = min(fitting, key=sizes.__getitem__) if fitting else max(self.free, key=sizes.__getitem__)
        self.free.remove(buffer)
        sizes[buffer] = max(sizes[buffer], size)
        return buffer

    def release(self, buffers: Sequence[int]) -> None:
        if self.reuses:
            self.free += buffers

    def constant(self, value: Value, data: Any) -> int:
        if id(data) not in self.constants:
            self.constants[id(data)] = self.number()
            self.program.constants[self.constants[id(data)]] = (value, data)
        return self.constants[id(data)]

    # -- a region -----------------------------------------------------------------------------------------------------
    def region(self, graph: Graph, inputs: dict[Value, int], targets: Sequence[int | None]) -> list[Any]:
        """Return the steps of a graph whose results are written to the targets."""
        graph = with_short_concatenations(graph, self.machine.model.buffers - 1)
        fused = group(graph, self.machine)
        locations = dict(inputs)
        stored = {v for step in fused.steps for v in step.outputs}
        copied: list[tuple[int, Value]] = []
        for target, v in zip(targets, graph.outputs, strict=True):
            source = fused.stored(v)
            if target is None or source in fused.in_place:
                continue  # written in the memory of the state
            if source in stored and source not in locations:
                locations[source] = target
            else:
                copied.append((target, source))
        last = self._last_uses(fused, copied)
        for i in graph.with_role("constant"):
            if i.value in last:
                locations[i.value] = self.constant(i.value, i.data)
        steps: list[Any] = []
        owned: dict[Value, int] = {}
        for k, step in enumerate(fused.steps):
            scratch = step.scratch if isinstance(step, Kernel) else []
            for v in (*step.outputs, *scratch):
                if v in fused.in_place:
                    locations[v] = locations[fused.in_place[v]]
                elif v not in locations:
                    locations[v] = owned[v] = self.take(self.bytes_of(v))
            if isinstance(step, Kernel):
                steps += self.kernel(step, [locations[fused.stored(v)] for v in step.parameters])
            else:
                read = [locations[fused.stored(v)] for v in step.inputs]
                steps += self.control(step.node, read, [locations[v] for v in step.outputs])
            ended = [v for v in owned if last.get(v, -1) <= k]
            self.release([owned.pop(v) for v in ended])
        steps += [Copy(locations[v], target, self.bytes_of(v)) for target, v in copied if locations[v] != target]
        self.release(list(owned.values()))
        return steps

    @staticmethod
    def _last_uses(fused: FusionPlan, copied: Sequence[tuple[int, Value]]) -> dict[Value, int]:
        """Return the last step that reads each stored value."""
        last = {fused.stored(v): k for k, step in enumerate(fused.steps) for v in step.inputs}
        return last | {v: len(fused.steps) for _, v in copied}

    def kernel(self, kernel: Kernel, buffers: list[int]) -> list[Run]:
        if all(0 in shape_of(v) for v in kernel.outputs):
            return []
        key, program = kernel.key(), self.program
        if key not in self.numbers:
            name = f"k{len(self.numbers)}_{kernel.name()}"
            with kernel_error_context(kernel):
                written = launches(name, kernel.template(kernel, name, self.machine), self.machine.model)
            self.check(kernel, written)
            first = len(program.launches)
            program.launches += written
            program.kernels |= {launch.name: kernel for launch in written}
            self.numbers[key] = tuple(range(first, len(program.launches)))
        return [Run(k, tuple(buffers[a] for a in program.launches[k].arguments)) for k in self.numbers[key]]

    def check(self, kernel: Kernel, written: Sequence[Launch]) -> None:
        count, limit = max((len(x.arguments) for x in written), default=0), self.machine.model.buffers
        if count > limit:
            raise UnsupportedError(
                f"the kernel of '{kernel.anchor.op.name}' reads and writes {count} arrays, and a launch binds {limit}",
                facts=[line for line in [str(kernel.anchor.origin)] if line],
                hint="split the operation into several, or concatenate some of its operands",
            )

    # -- control flow -------------------------------------------------------------------------------------------------
    def control(self, node: Node, inputs: list[int], outputs: list[int]) -> list[Any]:
        kinds = {"if": self.branch, "while": self.loop, "scan": self.scan}
        if node.regions:
            return kinds[node.op.name](node, inputs, outputs)
        self.program.calls.append(node)
        return [Call(node, tuple(inputs), tuple(outputs))]

    def inner(self, region: Graph, inputs: Sequence[int], targets: Sequence[int]) -> tuple[Any, ...]:
        arguments = {i.value: b for i, b in zip(region.arguments, inputs, strict=True)}
        return tuple(self.region(region, arguments, targets))

    def branch(self, node: Node, inputs: list[int], outputs: list[int]) -> list[Any]:
        yes, no = (self.inner(r, inputs[1:], outputs) for r in node.regions)
        return [Branch(inputs[0], yes, no)]

    def copies(self, values: Sequence[Value], sources: Sequence[int], targets: Sequence[int]) -> tuple[Copy, ...]:
        rows = zip(values, sources, targets, strict=True)
        return tuple(Copy(a, b, self.bytes_of(v)) for v, a, b in rows if a != b and self.bytes_of(v))

    def loop(self, node: Node, inputs: list[int], outputs: list[int]) -> list[Any]:
        count = node.attributes["states"]
        after = [self.take(self.bytes_of(v)) for v in node.results]
        (holds,) = node.regions[0].outputs
        condition = self.take(self.bytes_of(holds))
        current = [*outputs, *inputs[count:]]
        test = self.inner(node.regions[0], current, [condition])
        body = self.inner(node.regions[1], current, after) + self.copies(node.results, after, outputs)
        self.release([*after, condition])
        first = self.copies(node.results, inputs[:count], outputs)
        return [*first, Loop(condition, test, body, node.attributes["max_trips"])]

    def scan(self, node: Node, inputs: list[int], outputs: list[int]) -> list[Any]:
        a, body = node.attributes, node.regions[0]
        carries, sequences, length = a["carries"], a["sequences"], int(a["length"])
        states = node.results[:carries]
        first = self.copies(states, inputs[:carries], outputs[:carries])
        if length == 0:
            return list(first)
        after = [self.take(self.bytes_of(v)) for v in states]
        elements = [i.value for i in body.arguments[carries : carries + sequences]]
        rows = [self.take(self.bytes_of(v)) for v in elements]
        stacked = body.outputs[carries:]
        written = [self.take(self.bytes_of(v)) for v in stacked]

        def moves(values: Sequence[Value], sources: list[int], targets: list[int], reads: bool) -> list[Copy]:
            result = []
            for v, source, target in zip(values, sources, targets, strict=True):
                if size := self.bytes_of(v):
                    result.append(Copy(source, target, size, size if reads else 0, 0 if reads else size))
            return result

        read = moves(elements, inputs[carries : carries + sequences], rows, True)
        current = [*outputs[:carries], *rows, *inputs[carries + sequences :]]
        statements = self.inner(body, current, [*after, *written])
        write = moves(stacked, written, outputs[carries:], False)
        steps = (*read, *statements, *write, *self.copies(states, after, outputs[:carries]))
        self.release([*after, *rows, *written])
        return [*first, Count(length, steps, a["reverse"])]
