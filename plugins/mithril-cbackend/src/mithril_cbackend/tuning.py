"""``optimization_level="high"``: of the templates' schedules those that are fastest here, on a graph's own sizes.

Every large product and convolution is compiled alone, once for each schedule on a short list, and timed on random
numbers. What won is kept in the cache folder for all graphs that have an operation of these sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from mithril.graph import Builder, Graph, Input, Node, Value, iterate
from mithril.runtime.backend import BuildOptions
from mithril.runtime.fingerprint import fingerprint, package_stamp
from mithril.runtime.measuring import in_turns
from mithril.runtime.store import Store
from mithril.runtime.winners import machine as this_machine
from mithril.types import float32
from mithril_cbackend.grouping import known_elements
from mithril_cbackend.lowering import convolutions, matmul
from mithril_cbackend.lowering.frame import Machine
from mithril_cbackend.lowering.reader import shape_of
from mithril_cbackend.purpose import Purpose

SMALL = 1 << 18  # multiplications: below, no schedule matters
MOST = 32  # operations that one compilation measures, the largest first
SECONDS = 0.1  # for each
MARGIN = 0.03  # of the time: smaller gains are noise
DEFAULT = ""  # as the templates would choose


def tuned(graph: Graph, machine: Machine, options: BuildOptions) -> Machine:
    """The machine with the schedules that won."""
    store = Store(options.settings.get("cache_dir"))
    found: dict[str, str] = {}
    given = operations(graph)
    for name, (node, within) in given.items():
        here = [machine.cpu, machine.threads, machine.vector_bytes, this_machine(), package_stamp("mithril_cbackend")]
        key = fingerprint("schedule", name, here)
        kept = store.get(key)
        if kept is None:
            kept = {"schedule": fastest(within, node, name, machine).encode()}
            store.put(key, kept)
        if kept["schedule"]:
            found[name] = kept["schedule"].decode()
    if given:
        what = f"the schedules of {len(given)} operations were measured, {len(found)} are not the usual ones"
        options.decisions.record("choice", what)
    return replace(machine, schedules=found)


def operations(graph: Graph) -> dict[str, tuple[Node, Graph]]:
    """The large products and convolutions of a graph and its regions, by what tells their schedules apart."""
    sized: dict[str, tuple[int, Node, Graph]] = {}
    for node, within in iterate(graph):
        if node.op.name in ("matmul", "conv", "conv_input_grad") and node.result.dtype is float32:
            product = matmul.product_of(node)
            name = str(product) if product is not None else convolutions.signature(node)
            sized[name] = (multiplications(node), node, within)
    large = sorted(((n, name) for name, (n, _, _) in sized.items() if n >= SMALL), reverse=True)
    return {name: sized[name][1:] for _, name in large[:MOST]}


def multiplications(node: Node) -> int:
    shapes = [shape_of(v) for v in (*node.operands, node.result) if v is not None]
    if node.op.name == "matmul":
        return int(np.prod(shapes[2])) * shapes[0][-1]
    image = shapes[2] if node.op.name == "conv" else shapes[0]
    return int(np.prod(image[2:])) * image[0] * int(np.prod(shapes[1]))


def fastest(graph: Graph, node: Node, name: str, machine: Machine) -> str:
    """The schedule that is faster than the usual one, which is the empty text."""
    choices = (matmul if node.op.name == "matmul" else convolutions).schedules(node, machine)
    alone = single(graph, node)
    calls = {DEFAULT: calling(alone, machine)}
    for chosen in choices:
        calls[chosen] = calling(alone, replace(machine, schedules={name: chosen}))
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

    def constant(i: Input) -> Input:
        return Input(i.value, "constant", random(i.value), i.tags) if i.name in known else i

    return alone.replaced(inputs=tuple(map(constant, alone.inputs)))


def random(value: Value) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).standard_normal(shape_of(value)).astype(np.float32)


def calling(graph: Graph, machine: Machine) -> Callable[[], Mapping[str, Any]]:
    from mithril_cbackend import building

    executable = building.compiled(graph, machine, Purpose())
    given = {i.name: random(i.value) for i in graph.arguments}
    return lambda: executable({}, given)
