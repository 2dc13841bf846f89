"""``profile=True``: the time of each stage and pass; the compiled model adds its calls to the same recorder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mithril.ir import Graph
from mithril_tools.trace_events import Recorder

if TYPE_CHECKING:
    from mithril.plugins import CompileContext


class Timing:
    """Observer that records stages and passes as events of the section ``compile``."""

    def __init__(self, context: CompileContext) -> None:
        self.watcher = self.recorder = Recorder(context.options["profile_output"])

    def stage(self, name: str, graph: Graph | None, start: float, seconds: float) -> None:
        nodes = {} if graph is None else {"nodes": len(graph.nodes)}
        self.recorder.add("compile", name, start, seconds, "", "stage", **nodes)

    def passed(self, name: str, before: Graph, after: Graph, start: float, seconds: float) -> None:
        change = {"before": len(before.nodes), "after": len(after.nodes)}
        self.recorder.add("compile", f"pass {name}", start, seconds, "", "pass", **change)

    def end(self, result: Any, error: BaseException | None) -> None:
        if self.recorder.path is not None:
            self.recorder.write()
