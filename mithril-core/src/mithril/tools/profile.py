"""``ml.profile()`` and what a model compiled with ``profile=True`` remembers: time per operation, named by layer.

Every call is timed as a whole, to its real end. It is then run again operation by operation, each waited for: that says
where the time goes, and costs more than the whole, whose operations overlap and fuse. Both figures are shown.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mithril import plugins
from mithril.backend.memory_plan import nbytes
from mithril.ir import Node
from mithril.runtime.interpreter import Stepped
from mithril.tools.program_summary import columns, si
from mithril.tools.trace_events import Recorder

if TYPE_CHECKING:
    from mithril.runtime.compiled_model import CompiledModel
    from mithril.runtime.program import Program

ACTIVE: list[Recorder] = []  # recorders of the ``with ml.profile()`` blocks being executed


@dataclass(frozen=True, slots=True)
class OperationTime:
    """All runs of one operation of one layer."""

    operation: str
    layer: str
    calls: int
    seconds: float
    share: float  # of all operations together
    flops: int  # of all runs
    bytes: int  # read and written by all runs
    fastest: float
    slowest: float

    @property
    def flops_per_second(self) -> float:
        return self.flops / self.seconds if self.seconds else 0.0

    @property
    def bytes_per_second(self) -> float:
        return self.bytes / self.seconds if self.seconds else 0.0


class Breakdown(dict[str, OperationTime]):
    """``"layer: operation"`` -> its times, slowest first; print it for the table."""

    def __str__(self) -> str:
        if not self:
            return "nothing has run yet"
        head = ["operation", "layer", "calls", "ms", "share", "FLOP/s", "B/s"]
        rows = [
            [
                t.operation,
                t.layer or "-",
                str(t.calls),
                f"{1e3 * t.seconds:.3f}",
                f"{100 * t.share:.1f}%",
                si(t.flops_per_second) if t.flops else "-",
                si(t.bytes_per_second),
            ]
            for t in self.values()
        ]
        return "\n".join(columns(head, rows))


class ProfileStats:
    """What a recorder holds, added up."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    @property
    def execution_breakdown(self) -> Breakdown:
        """Time per operation and layer, over all calls."""
        groups: dict[tuple[str, str], list[Any]] = {}
        for event in self.recorder.of("run", "operation"):
            groups.setdefault((event.layer, event.name), []).append(event)
        whole = sum(e.seconds for events in groups.values() for e in events) or 1.0
        made = [
            OperationTime(
                operation=name,
                layer=layer,
                calls=len(events),
                seconds=sum(e.seconds for e in events),
                share=sum(e.seconds for e in events) / whole,
                flops=sum(e.info.get("flops", 0) for e in events),
                bytes=sum(e.info.get("bytes", 0) for e in events),
                fastest=min(e.seconds for e in events),
                slowest=max(e.seconds for e in events),
            )
            for (layer, name), events in groups.items()
        ]
        made.sort(key=lambda t: -t.seconds)
        return Breakdown((f"{t.layer}: {t.operation}" if t.layer else t.operation, t) for t in made)

    @property
    def compile_breakdown(self) -> dict[str, float]:
        """Seconds per stage and pass of compiling."""
        found: dict[str, float] = {}
        for event in self.recorder.events:
            if event.section == "compile":
                found[event.name] = found.get(event.name, 0.0) + event.seconds
        return found

    @property
    def calls(self) -> int:
        return len(self.recorder.of("run", "call"))

    @property
    def call_seconds(self) -> float:
        """Median of a whole call."""
        times = [e.seconds for e in self.recorder.of("run", "call")]
        return statistics.median(times) if times else 0.0

    def summary(self) -> str:
        """Tables of compiling and of running."""
        parts = []
        stages = self.compile_breakdown
        if stages:
            rows = [[name, f"{1e3 * seconds:.2f}"] for name, seconds in stages.items()]
            parts.append("\n".join(columns(["compile", "ms"], rows)))
        if self.calls:
            stepped = sum(e.seconds for e in self.recorder.of("run", "operation"))
            whole = sum(e.seconds for e in self.recorder.of("run", "call"))
            text = f"{self.calls} call{'s' * (self.calls != 1)}, median {1e3 * self.call_seconds:.3f} ms"
            if stepped:
                text += f"; operation by operation {stepped / whole:.2f} times as long"
                text += f"\n\n{self.execution_breakdown}"
            parts.append(text)
        return "\n\n".join(parts) or "nothing was recorded"

    def write(self, path: str | Path) -> None:
        """Chrome-trace JSON with the sections compile and run."""
        self.recorder.write(path)

    def __str__(self) -> str:
        return self.summary()


@contextmanager
def profile(output: str | Path | None = None, *, stepped: bool = True, profiler: str | None = None) -> Iterator[Any]:
    """Record every call of every compiled model inside the block.

    ``stepped=False`` times whole calls only. ``output`` is a file for the Chrome trace, written at the end.
    ``profiler`` names one that a plugin brings, which then measures the block instead.
    """
    if profiler is not None:
        with plugins.load_profiler(profiler)() as running:
            yield running
        return
    recorder = Recorder(output, stepped=stepped)
    ACTIVE.append(recorder)
    try:
        yield ProfileStats(recorder)
    finally:
        ACTIVE.remove(recorder)
    if output is not None:
        recorder.write()


def measured(
    model: CompiledModel,
    program: Program,
    params: Mapping[str, Any],
    inputs: Mapping[str, Any],
    recorders: list[Recorder],
) -> dict[str, Any]:
    """The program's results, with the call recorded."""
    backend = model.backend
    backend.synchronize([*params.values(), *inputs.values()])
    if not program.timed:  # the first run compiles, allocates, fills caches: not what later calls cost
        backend.synchronize(program.executable(params, inputs))
        program.timed = True
    start = time.perf_counter()
    results: dict[str, Any] = program.executable(params, inputs)
    backend.synchronize(results)
    seconds = time.perf_counter() - start
    for recorder in recorders:
        recorder.add("run", model.name, start, seconds, "", "call", backend=backend.name)
    stepping = [r for r in recorders if r.stepped]
    if stepping:
        operation_times(model, program, {**params, **inputs}, stepping)
    return results


def operation_times(
    model: CompiledModel, program: Program, arguments: Mapping[str, Any], recorders: list[Recorder]
) -> None:
    """One more run, operation by operation; the first such run of a program is done twice, once to warm up."""
    shapes = tuple((name, tuple(a.shape)) for name, a in arguments.items())
    stepped = program.stepped.get(shapes)
    if stepped is None:
        concrete = model.concrete(program, {name: tuple(a.shape) for name, a in arguments.items()})
        stepped = program.stepped[shapes] = Stepped(concrete, model.backend)
        stepped.run(arguments)

    def watch(node: Node, start: float, seconds: float) -> None:
        info = cost(node)
        for recorder in recorders:
            recorder.add("run", node.op.name, start, seconds, node.origin.path, "operation", **info)

    stepped.run(arguments, watch)


def cost(node: Node) -> dict[str, Any]:
    """Floating-point operations and bytes of a static node, and its result's type."""
    moved = sum(nbytes(v.type) for v in (*node.operands, *node.results) if v is not None)
    flops = getattr(node.op, "flops", None)
    types = [None if v is None else v.type for v in node.operands]
    count = int(flops(types, [v.type for v in node.results], node.attributes)) if flops is not None else 0
    return {"flops": count, "bytes": moved, "type": str(node.result.type)}


__all__ = ["Breakdown", "OperationTime", "ProfileStats", "measured", "operation_times", "profile"]
