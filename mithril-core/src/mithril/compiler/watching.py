"""Watchers, which are notified of the time of each call of a compiled model and of its operations."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from mithril import plugins
from mithril.backend import Backend, nbytes, plugin_of
from mithril.compiler.bound_weights import plain_weights
from mithril.compiler.interpreter import Interpreter
from mithril.compiler.program import Program
from mithril.graph import Decisions, Graph, Node, counted_flops


class Watcher(Protocol):
    """The interface of watchers. If ``stepped`` is set, calls also run operation by operation."""

    stepped: bool

    def add(
        self, section: str, name: str, start: float, seconds: float, layer: str = "", kind: str = "", **info: Any
    ) -> None: ...


class Watched(Protocol):
    """The attributes of a compiled model that the measurement of calls uses."""

    name: str
    backend: Backend
    decisions: Decisions

    def concrete(self, program: Program, shapes: Mapping[str, tuple[int, ...]], /) -> Graph: ...


# Watchers of every call in this context; those of one model are its own attribute.
watchers: ContextVar[tuple[Watcher, ...]] = ContextVar("watchers", default=())


@contextmanager
def watch(watcher: Watcher) -> Iterator[None]:
    """Report every call of every compiled model inside the block to ``watcher``."""
    token = watchers.set((*watchers.get(), watcher))
    try:
        yield
    finally:
        watchers.reset(token)


def measured(
    model: Watched,
    program: Program,
    params: Mapping[str, Any],
    inputs: Mapping[str, Any],
    watching: Sequence[Watcher],
) -> dict[str, Any]:
    """Run the program and report the call to all watchers."""
    backend = model.backend
    backend.synchronize([*params.values(), *inputs.values()])
    if not program.timed:  # the first run compiles, allocates and fills caches
        copies = {n: backend.copied(inputs[n]) for n in program.interface.donated}
        backend.synchronize(program.executable(params, {**inputs, **copies}))
        program.timed = True
    start = time.perf_counter()
    results: dict[str, Any] = program.executable(params, inputs)
    backend.synchronize(results)
    seconds = time.perf_counter() - start
    for recorder in watching:
        _tell(model, recorder, "run", model.name, start, seconds, "", "call", backend=backend.name)
    stepping = [w for w in watching if w.stepped]
    if stepping:
        plain = {} if program.weights is None else plain_weights(program)
        operation_times(model, program, {**plain, **params, **inputs}, stepping)
    return results


def operation_times(
    model: Watched, program: Program, arguments: Mapping[str, Any], watching: Sequence[Watcher]
) -> None:
    """Run the program again, operation by operation; repeat the first such run as warm-up."""
    shapes = tuple((name, tuple(a.shape)) for name, a in arguments.items())
    stepped = program.stepped.get(shapes)
    if stepped is None:
        concrete = model.concrete(program, {name: tuple(a.shape) for name, a in arguments.items()})
        stepped = program.stepped[shapes] = Interpreter(concrete, model.backend)
        stepped.run(arguments)

    def watch(node: Node, start: float, seconds: float) -> None:
        info = {**cost(node), "model": model.name, "compiled": id(model)}
        for recorder in watching:
            _tell(model, recorder, "run", node.op.name, start, seconds, node.origin.path, "operation", **info)

    stepped.run(arguments, watch)


def _tell(model: Watched, recorder: Watcher, /, *event: Any, **info: Any) -> None:
    """Report an event to a watcher; results do not depend on a watcher of a plugin that fails."""
    try:
        recorder.add(*event, **info)
    except Exception as cause:
        plugin = plugin_of(type(recorder).__module__)
        if plugin is None:
            raise
        plugins.report([(plugin, f"mithril_observers: {type(recorder).__name__}.add", cause)], model.decisions)


def cost(node: Node) -> dict[str, Any]:
    """Return floating-point operations, operations of unknown ones, bytes and result type of a static node."""
    num_bytes = sum(nbytes(v.type) for v in (*node.operands, *node.results) if v is not None)
    flops, unknown = counted_flops(node)
    return {"flops": int(flops), "unknown": unknown, "bytes": num_bytes, "type": str(node.result.type)}
