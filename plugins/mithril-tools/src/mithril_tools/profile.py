"""``ml.profile()`` and the records of a model compiled with ``profile=True``: time per operation, named by layer.

Every call is timed as a whole, synchronized at its end. It is then run again operation by operation, each synchronized:
this shows the distribution of the time, but takes longer than the whole call, whose operations overlap and fuse. Both
figures are shown.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mithril import plugins
from mithril.backend import checked
from mithril.compiler import columns, format_flops, format_si, watch
from mithril.graph import InputError
from mithril.system import notebook
from mithril_tools.trace_events import Recorder

if TYPE_CHECKING:
    from mithril.compiler import CompiledModel

ALONE = "shares are of operations run one at a time; a compiled program joins some, such as transposes into products"


@dataclass(frozen=True, slots=True)
class OperationTime:
    """Statistics of one operation of one layer."""

    operation: str
    layer: str
    calls: int
    seconds: float
    share: float  # of all operations
    flops: int  # of all runs
    bytes: int  # read and written by all runs
    fastest: float
    slowest: float
    model: str = ""  # if several were profiled
    unknown: tuple[str, ...] = ()  # operations that add to ``flops``, and declare none

    @property
    def flops_per_second(self) -> float:
        return self.flops / self.seconds if self.seconds else 0.0

    @property
    def bytes_per_second(self) -> float:
        return self.bytes / self.seconds if self.seconds else 0.0


class Breakdown(dict[str, OperationTime]):
    """Times by ``"layer: operation"``, slowest first; prints as a table. Several models have rows of their own."""

    def __str__(self) -> str:
        if not self:
            return "nothing has run yet"
        several = any(t.model for t in self.values())
        head = [*(["model"] if several else []), "operation", "layer", "calls", "ms", "share", "FLOP/s", "B/s"]
        rows = [
            [
                *([t.model] if several else []),
                t.operation,
                t.layer or "-",
                str(t.calls),
                f"{1e3 * t.seconds:.3f}",
                f"{100 * t.share:.1f}%",
                format_flops(t.flops_per_second, t.unknown) if t.flops or t.unknown else "-",
                format_si(t.bytes_per_second),
            ]
            for t in self.values()
        ]
        return "\n".join(columns(head, rows))


def _model_names(events: Sequence[Any]) -> dict[int, str]:
    """Return a name for each profiled model, or an empty one for a single model: names can be equal."""
    models = {e.info.get("compiled", 0): e.info.get("model", "") for e in events}  # other profilers time no models
    if len(models) < 2:
        return dict.fromkeys(models, "")
    used = list(models.values())
    return {key: name if used.count(name) == 1 else f"{name} {k}" for k, (key, name) in enumerate(models.items(), 1)}


class ProfileStats:
    """The aggregated events of a recorder."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    @property
    def execution_breakdown(self) -> Breakdown:
        """The time per operation and layer, over all calls."""
        groups: dict[tuple[str, str, str], list[Any]] = {}
        events = self.recorder.of("run", "operation")
        models = _model_names(events)
        for event in events:
            groups.setdefault((models[event.info.get("compiled", 0)], event.layer, event.name), []).append(event)
        total = sum(e.seconds for events in groups.values() for e in events) or 1.0
        rows = [
            OperationTime(
                operation=name,
                layer=layer,
                calls=len(events),
                seconds=sum(e.seconds for e in events),
                share=sum(e.seconds for e in events) / total,
                flops=sum(e.info.get("flops", 0) for e in events),
                bytes=sum(e.info.get("bytes", 0) for e in events),
                fastest=min(e.seconds for e in events),
                slowest=max(e.seconds for e in events),
                model=model,
                unknown=events[0].info.get("unknown", ()),
            )
            for (model, layer, name), events in groups.items()
        ]
        rows.sort(key=lambda t: -t.seconds)
        return Breakdown((": ".join(filter(None, (t.model, t.layer, t.operation))), t) for t in rows)

    @property
    def compile_breakdown(self) -> dict[str, float]:
        """The seconds per stage and pass of compilation."""
        seconds: dict[str, float] = {}
        for event in self.recorder.events:
            if event.section == "compile":
                seconds[event.name] = seconds.get(event.name, 0.0) + event.seconds
        return seconds

    @property
    def calls(self) -> int:
        return len(self.recorder.of("run", "call"))

    @property
    def call_seconds(self) -> float:
        """The median seconds of a whole call."""
        times = [e.seconds for e in self.recorder.of("run", "call")]
        return statistics.median(times) if times else 0.0

    def summary(self) -> str:
        """Return tables of compilation and run time."""
        parts = []
        stages = self.compile_breakdown
        if stages:
            rows = [[name, f"{1e3 * seconds:.2f}"] for name, seconds in stages.items()]
            parts.append("\n".join(columns(["compile", "ms"], rows)))
        if self.calls:
            stepped = sum(e.seconds for e in self.recorder.of("run", "operation"))
            total = sum(e.seconds for e in self.recorder.of("run", "call"))
            text = f"{self.calls} call{'s' * (self.calls != 1)}, median {1e3 * self.call_seconds:.3f} ms"
            if stepped:
                text += f"; operation by operation {stepped / total:.2f} times as long\n{ALONE}"
                text += f"\n\n{self.execution_breakdown}"
            parts.append(text)
        return "\n\n".join(parts) or "nothing was recorded"

    def write(self, path: str | Path) -> None:
        """Write a Chrome trace with the sections compile and run."""
        self.recorder.write(path)

    def __str__(self) -> str:
        return self.summary()

    def _repr_html_(self) -> str:
        stages = self.compile_breakdown
        longest = max(stages.values(), default=0.0) or 1.0
        rows = [(name, f"{1e3 * seconds:.2f}") for name, seconds in stages.items()]
        compiled = notebook.table(("compile", "ms"), rows, [s / longest for s in stages.values()])
        times = list(self.execution_breakdown.values())
        head = ("operation", "layer", "calls", "ms", "share")
        table = [(t.operation, t.layer, t.calls, f"{1e3 * t.seconds:.3f}", f"{100 * t.share:.1f} %") for t in times]
        run = notebook.table(head, table, [t.share for t in times])
        title = f"{self.calls} calls, median {1e3 * self.call_seconds:.3f} ms"
        return notebook.folded("compilation", compiled) + notebook.heading(title) + run


@checked()
@contextmanager
def profile(output: str | Path | None = None, *, stepped: bool = True, profiler: str | None = None) -> Iterator[Any]:
    """Record every call of every compiled model inside the block.

    ``stepped=False`` times whole calls only. ``output`` is a file for the Chrome trace, written at the end.
    ``profiler`` names a profiler of a plugin, which then measures the block instead.
    """
    if profiler is not None:
        with plugins.load_profiler(profiler)() as running:
            yield running
        return
    recorder = Recorder(output, stepped=stepped)
    with watch(recorder):
        yield ProfileStats(recorder)
    if output is not None:
        recorder.write()


def stats_of(model: CompiledModel) -> ProfileStats:
    """Return the times of compilation and of all calls so far, of a model compiled with ``profile=True``."""
    recorder = next((w for w in model.watchers if isinstance(w, Recorder)), None)
    if recorder is None:
        raise InputError(
            "this model keeps no profile",
            hint="compile it with profile=True, or run it inside `with ml.profile() as prof:`",
        )
    if recorder.path is not None:
        recorder.write()
    return ProfileStats(recorder)


__all__ = ["Breakdown", "OperationTime", "ProfileStats", "profile", "stats_of"]
