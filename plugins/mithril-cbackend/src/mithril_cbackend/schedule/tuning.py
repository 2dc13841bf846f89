"""Schedules that are not the usual ones: those of a file, and with ``optimization_level="high"`` those that win here.

Every large product and convolution is compiled alone, once for each schedule on a short list, and timed on random
numbers. What won is kept in the cache folder for all graphs that have an operation of these sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mithril import ops
from mithril.backend import BuildOptions
from mithril.base import Store, fingerprint, float32, in_turns, package_stamp
from mithril.ir import Builder, Graph, Input, Node, Value, iterate
from mithril.passes import random_arguments
from mithril_cbackend.compile_target import Purpose
from mithril_cbackend.graph.fusion import known_elements
from mithril_cbackend.lowering.conv import direct_convolution
from mithril_cbackend.lowering.element.element_reader import operand, shape_of
from mithril_cbackend.lowering.element.kernel_builder import Machine
from mithril_cbackend.lowering.matmul import matmul, matmul_form
from mithril_cbackend.schedule.schedules import Schedules, kind
from mithril_tools.tuning_cache import machine as this_machine

SMALL = 1 << 18  # multiplications: below, no schedule matters
MOST = 32  # operations that one compilation measures, the largest first
SECONDS = 0.1  # for each
MARGIN = 0.03  # of the time: smaller gains are noise
DEFAULT = ""  # as the templates would choose
PRODUCTS, CONVOLUTIONS = (ops.matmul, ops.dot), (ops.conv, ops.conv_input_grad)
Compile = Callable[[Graph, Machine, Purpose], Callable[..., Mapping[str, Any]]]


@dataclass(frozen=True)
class Operation:
    """A product or convolution of certain sizes, and how often the graph has it."""

    name: str  # what tells schedules apart
    node: Node
    within: Graph
    multiplications: int
    count: int = 1

    def choices(self, machine: Machine) -> list[str]:
        """The short list."""
        if self.node.op in PRODUCTS:
            return matmul.schedules(self.node, machine)
        return direct_convolution.schedules(self.node, machine)

    def all_choices(self, machine: Machine) -> list[str]:
        """Every schedule there is."""
        if self.node.op in CONVOLUTIONS:
            return direct_convolution.schedules(self.node, machine, most=1 << 10)
        return crossed(self.choices(machine))


def crossed(choices: list[str]) -> list[str]:
    """Tiles, as "8x32", with each of the depths that the list has for the usual tile, as "8x32x512"."""
    parts = [c.split("x") for c in choices]
    tiles = dict.fromkeys("x".join(p[:2]) for p in parts)
    depths = dict.fromkeys(p[2] for p in parts if len(p) > 2)
    return [*tiles, *(f"{tile}x{depth}" for tile in tiles for depth in depths)]


def scheduled(graph: Graph, machine: Machine, options: BuildOptions, shipped: Schedules, compiled: Compile) -> Machine:
    """The machine with the schedules that a file has for it, and with those that won here."""
    high = options.settings.get("optimization_level") == "high"
    if not high and not shipped.machines:
        return machine
    given = operations(graph)
    found = of_file(given, machine, options, shipped)
    if high:
        large = {n: x for n, x in given.items() if x.multiplications >= SMALL and n not in found}
        found |= measured(dict(list(large.items())[:MOST]), machine, options, compiled)
    return replace(machine, schedules={n: chosen for n, chosen in found.items() if chosen})


def of_file(
    given: Mapping[str, Operation], machine: Machine, options: BuildOptions, shipped: Schedules
) -> dict[str, str]:
    """Those for this machine that the templates still have."""
    if not shipped.machines:
        return {}
    if kind(machine) not in shipped.machines:
        known = "; ".join(sorted(shipped.machines))
        what = f"schedules: the file has none for {kind(machine)}; it has some for {known}"
        options.decisions.record("ignored", what)
        return {}
    found = {n: chosen for n, chosen in shipped.machines[kind(machine)].items() if n in given}
    for name, chosen in list(found.items()):
        if chosen not in given[name].all_choices(machine):
            options.decisions.record("ignored", f"schedules: this version has none named '{chosen}' for {name}")
            del found[name]
    options.decisions.record("choice", f"schedules: the file has those of {len(found)} of {len(given)} operations")
    return found


def measured(
    given: Mapping[str, Operation], machine: Machine, options: BuildOptions, compiled: Compile
) -> dict[str, str]:
    """Those that were found before, or are found now, to be the fastest here."""
    store = Store(options.settings.get("cache_dir"))
    found: dict[str, str] = {}
    for name, operation in given.items():
        kept = remembered(store, name, machine)
        if kept is None:
            kept = fastest(operation, machine, compiled)
            remember(store, name, machine, kept)
        found[name] = kept
    if given:
        others = sum(1 for chosen in found.values() if chosen)
        what = f"the schedules of {len(given)} operations were measured, {others} are not the usual ones"
        options.decisions.record("choice", what)
    return found


def remembered(store: Store, name: str, machine: Machine) -> str | None:
    kept = store.get(_key(name, machine))
    return kept["schedule"].decode() if kept is not None else None


def remember(store: Store, name: str, machine: Machine, chosen: str) -> None:
    store.put(_key(name, machine), {"schedule": chosen.encode()})


def _key(name: str, machine: Machine) -> str:
    here = [machine.cpu, machine.threads, machine.vector_bytes, this_machine(), package_stamp("mithril_cbackend")]
    return fingerprint("schedule", name, here)


def operations(graph: Graph) -> dict[str, Operation]:
    """The products and convolutions of a graph and its regions by name, the largest first."""
    found: dict[str, Operation] = {}
    for node, within in iterate(graph):
        product = matmul_form.product_of(node) if node.op in PRODUCTS else None
        if product is not None:
            name, size = str(product), product.m * product.n * product.k * math.prod(product.batch)
        elif node.op in CONVOLUTIONS and node.result.dtype is float32:
            image = shape_of(node.result if node.op is ops.conv else operand(node))
            name = direct_convolution.signature(node)
            size = math.prod(image[2:]) * image[0] * math.prod(shape_of(operand(node, 1)))
        else:
            continue
        known = found.get(name)
        found[name] = replace(known, count=known.count + 1) if known else Operation(name, node, within, size)
    return {o.name: o for o in sorted(found.values(), key=lambda o: (-o.multiplications, o.name))}


def fastest(operation: Operation, machine: Machine, compiled: Compile) -> str:
    """The schedule that is faster than the usual one, which is the empty text."""
    alone = single(operation.within, operation.node)
    calls = {DEFAULT: Call(alone, machine, compiled)}
    for chosen in operation.choices(machine):
        calls[chosen] = Call(alone, replace(machine, schedules={operation.name: chosen}), compiled)
    times = in_turns(calls, seconds=SECONDS)
    best = min(times, key=lambda n: times[n])
    return best if times[best] < (1 - MARGIN) * times[DEFAULT] else DEFAULT


def single(graph: Graph, node: Node) -> Graph:
    """An operation alone, its right operand known if it is known in the graph."""
    known: set[str] = set()
    operands: list[Value | None] = []
    with Builder() as b:
        for k, v in enumerate(node.operands):
            assert v is not None
            operands.append(b.input(f"x{k}", shape_of(v), v.dtype))
            if k == 1 and known_elements(graph, v) is not None:
                known.add(f"x{k}")
        made = b.emit(node.op, operands, node.attributes)
    alone = b.build({"y": made[0]})
    arrays = random_arguments(alone)

    def constant(i: Input) -> Input:
        return Input(i.value, "constant", arrays[i.name], i.tags) if i.name in known else i

    return alone.replaced(inputs=tuple(map(constant, alone.inputs)))


class Call:
    """A call of a graph's program on random numbers."""

    def __init__(self, graph: Graph, machine: Machine, compiled: Compile) -> None:
        self.executable = compiled(graph, machine, Purpose())
        self.given = random_arguments(graph)

    def __call__(self) -> Mapping[str, Any]:
        return self.executable(self.given, self.given)
