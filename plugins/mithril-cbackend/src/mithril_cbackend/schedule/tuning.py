"""Selection of schedules: from a file, and with ``optimization_level="high"`` by measurement on this machine.

Every large matmul, convolution and reduction is compiled alone, once for each schedule of a short list, and timed on
random inputs. The fastest is cached on disk for all graphs with an operation of these sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mithril import ops
from mithril.backend import BuildOptions
from mithril.graph import Builder, Graph, Input, Node, Value, float32, iterate
from mithril.passes import random_arguments
from mithril.system import (
    Store,
    fingerprint,
    package_version_key,
    read_measured,
    save_measured,
    this_machine,
    time_interleaved,
)
from mithril_cbackend.compile_target import CompileTarget
from mithril_cbackend.graph.fusion import known_weights
from mithril_cbackend.lowering.conv import direct_convolution
from mithril_cbackend.lowering.element.element_reader import operand, shape_of
from mithril_cbackend.lowering.element.kernel_builder import Machine
from mithril_cbackend.lowering.matmul import matmul, matmul_form
from mithril_cbackend.lowering.rows import reductions
from mithril_cbackend.lowering.scheduled import folds
from mithril_cbackend.program.executable import Executable
from mithril_cbackend.schedule.schedules import Schedules, kind

SMALL = 1 << 18  # multiplications; schedules do not matter for smaller operations
MAX_OPERATIONS = 32  # measured in one compilation, the largest first
SECONDS = 0.1  # per operation
MARGIN = 0.03  # fraction of the time; smaller gains are noise
DEFAULT = ""  # the schedule that the template selects
PRODUCTS, CONVOLUTIONS = (ops.matmul, ops.dot), (ops.conv, ops.conv_input_grad)
Compile = Callable[[Graph, Machine, CompileTarget], Executable]


@dataclass(frozen=True)
class Operation:
    """A matmul, convolution or reduction of certain sizes, and how often it occurs in the graph."""

    name: str  # key of its schedules
    node: Node
    within: Graph
    multiplications: int
    count: int = 1

    def choices(self, machine: Machine) -> list[str]:
        """Return the short list of schedules."""
        if self.node.op in PRODUCTS:
            return matmul.schedules(self.node, machine)
        if self.node.op in reductions.FOLDS:
            return folds.schedules(self.node, machine)
        return direct_convolution.schedules(self.node, machine)

    def all_choices(self, machine: Machine) -> list[str]:
        """Return all schedules."""
        if self.node.op in CONVOLUTIONS:
            return direct_convolution.schedules(self.node, machine, max_per_kind=1 << 10)
        if self.node.op in reductions.FOLDS:
            return self.choices(machine)
        return cross_depths(self.choices(machine))


def cross_depths(choices: list[str]) -> list[str]:
    """Combine tiles ("8x32") with the depths that the list has for the default tile ("8x32x512")."""
    parts = [c.split("x") for c in choices]
    tiles = dict.fromkeys("x".join(p[:2]) for p in parts)
    depths = dict.fromkeys(p[2] for p in parts if len(p) > 2)
    return [*tiles, *(f"{tile}x{depth}" for tile in tiles for depth in depths)]


def scheduled(graph: Graph, machine: Machine, options: BuildOptions, shipped: Schedules, compiled: Compile) -> Machine:
    """Return the machine with its schedules from the file and from measurements."""
    high = options.settings["optimization_level"] == "high"
    if not high and not shipped.machines:
        return machine
    candidates = operations(graph)
    schedules = from_file(candidates, machine, options, shipped)
    if high:
        large = {n: x for n, x in candidates.items() if x.multiplications >= SMALL and n not in schedules}
        schedules |= measure(dict(list(large.items())[:MAX_OPERATIONS]), machine, options, compiled)
    return replace(machine, schedules={n: schedule for n, schedule in schedules.items() if schedule})


def from_file(
    operations: Mapping[str, Operation], machine: Machine, options: BuildOptions, shipped: Schedules
) -> dict[str, str]:
    """Return the schedules of the file that apply to this machine and that the templates support."""
    if not shipped.machines:
        return {}
    if kind(machine) not in shipped.machines:
        available = "; ".join(sorted(shipped.machines))
        message = f"schedules: the file has no entry for {kind(machine)}, only for {available}"
        options.decisions.record("ignored", message)
        return {}
    schedules = {n: schedule for n, schedule in shipped.machines[kind(machine)].items() if n in operations}
    for name, schedule in list(schedules.items()):
        if schedule not in operations[name].all_choices(machine):
            options.decisions.record("ignored", f"schedules: unknown schedule '{schedule}' for {name}")
            del schedules[name]
    options.decisions.record("choice", f"schedules: from the file for {len(schedules)} of {len(operations)} operations")
    return schedules


def measure(
    operations: Mapping[str, Operation], machine: Machine, options: BuildOptions, compiled: Compile
) -> dict[str, str]:
    """Return the fastest schedules, measured now or read from the cache."""
    store = Store(options.settings["cache_dir"])
    schedules: dict[str, str] = {}
    for name, operation in operations.items():
        schedule = load_cached(store, name, machine)
        if schedule is None:
            schedule = fastest(operation, machine, compiled)
            save_cached(store, name, machine, schedule)
        schedules[name] = schedule
    if operations:
        num_changed = sum(1 for schedule in schedules.values() if schedule)
        message = f"measured the schedules of {len(operations)} operations, {num_changed} differ from the default"
        options.decisions.record("choice", message)
    return schedules


def load_cached(store: Store, name: str, machine: Machine) -> str | None:
    entry = read_measured(store, _key(name, machine))
    return entry if isinstance(entry, str) else None


def save_cached(store: Store, name: str, machine: Machine, schedule: str) -> None:
    save_measured(store, _key(name, machine), schedule)


def _key(name: str, machine: Machine) -> str:
    # Everything but the operation that times depend on: a schedule of another CPU or version is
    # measured again.
    environment = [
        machine.cpu,
        machine.threads,
        machine.vector_bytes,
        this_machine(),
        package_version_key("mithril_cbackend"),
    ]
    return fingerprint("schedule", name, environment)


def operations(graph: Graph) -> dict[str, Operation]:
    """Return the matmuls, convolutions and large reductions of a graph and its regions by name, the largest first."""
    entries: dict[str, Operation] = {}
    for node, within in iterate(graph):
        product = matmul_form.product_of(node) if node.op in PRODUCTS else None
        if product is not None:
            name, size = str(product), product.m * product.n * product.k * math.prod(product.batch)
        elif node.op in CONVOLUTIONS and node.result.dtype is float32:
            image = shape_of(node.result if node.op is ops.conv else operand(node))
            name = direct_convolution.signature(node)
            size = math.prod(image[2:]) * image[0] * math.prod(shape_of(operand(node, 1)))
        elif node.op in reductions.FOLDS and math.prod(shape_of(operand(node))) >= SMALL:
            name, size = folds.signature(node), math.prod(shape_of(operand(node)))
        else:
            continue
        existing = entries.get(name)
        entries[name] = replace(existing, count=existing.count + 1) if existing else Operation(name, node, within, size)
    return {o.name: o for o in sorted(entries.values(), key=lambda o: (-o.multiplications, o.name))}


def fastest(operation: Operation, machine: Machine, compiled: Compile) -> str:
    """Return the fastest schedule, or DEFAULT if none is clearly faster than the default."""
    graph = single(operation.within, operation.node)
    calls = {DEFAULT: Call(graph, machine, compiled)}
    for schedule in operation.choices(machine):
        calls[schedule] = Call(graph, replace(machine, schedules={operation.name: schedule}), compiled)
    times = time_interleaved(calls, finished, seconds=SECONDS)
    best = min(times, key=lambda n: times[n])
    return best if times.is_faster(best, DEFAULT, MARGIN) else DEFAULT


def finished(result: Any) -> Any:
    """Return the result of a call: kernels run before it returns."""
    return result


def single(graph: Graph, node: Node) -> Graph:
    """Build a graph of one operation, whose right operand is constant if it is constant in the graph."""
    constants: set[str] = set()
    operands: list[Value | None] = []
    with Builder() as b:
        for k, v in enumerate(node.operands):
            assert v is not None
            operands.append(b.input(f"x{k}", shape_of(v), v.dtype))
            if k == 1 and known_weights(graph, v) is not None:
                constants.add(f"x{k}")
        results = b.emit(node.op, operands, node.attributes)
    single_graph = b.build({"y": results[0]})
    arrays = random_arguments(single_graph)

    def constant(i: Input) -> Input:
        return Input(i.value, "constant", arrays[i.name], i.tags) if i.name in constants else i

    return single_graph.replaced(inputs=tuple(map(constant, single_graph.inputs)))


class Call:
    """A call of a graph's program on random inputs."""

    def __init__(self, graph: Graph, machine: Machine, compiled: Compile) -> None:
        self.executable = compiled(graph, machine, CompileTarget())
        self.inputs = random_arguments(graph)
        self.weights = self.executable.layout.bound(self.inputs, {})

    def __call__(self) -> Mapping[str, Any]:
        return self.executable(self.weights, self.inputs)
