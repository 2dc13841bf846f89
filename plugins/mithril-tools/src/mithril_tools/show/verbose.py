"""``verbose=True``: each stage with its time, each pass with the operations before and after it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from mithril.graph import Graph, visible
from mithril_tools.trace_events import Recorder

if TYPE_CHECKING:
    from mithril.plugins import CompileContext


STEPS = {
    "flatten": "nested models become one list of layers",
    "resolve": "names lead to connections",
    "shapes": "shape inference",
    "types": "type inference",
    "gradients": "the backward graph",
    "optimize": "passes",
    "generate": "what the backend does not run is decomposed",
    "build": "functions",
    "cached": "found on disk",
}


class Verbose:
    """Observer that prints stages and passes as they end; on a terminal also the current one."""

    def __init__(self, context: CompileContext) -> None:
        self.context = context
        self.console = Console(highlight=False)
        self.seconds = 0.0
        self.passes: list[tuple[str, Graph, Graph, float]] = []
        name = getattr(context.model, "name", None) or type(context.model).__name__
        target = f", target {context.target.name}" if context.target else ""
        self._print(f"compiling {name} for {context.backend!r}, level {context.level}{target}", "bold")
        self.status = self.console.status("flatten ...") if self.console.is_terminal else None
        if self.status is not None:
            self.status.start()

    def stage(self, name: str, graph: Graph | None, start: float, seconds: float) -> None:
        count = f"{len(graph.nodes):>6} nodes" if graph is not None else " " * 12
        self._print(f"  {name:<11}{1e3 * seconds:>9.2f} ms {count}  {STEPS.get(name, '')}")
        self.seconds += seconds
        if name == "optimize":
            self._passes()
        if self.status is not None:
            self.status.update(f"after {name} ...")

    def passed(self, name: str, before: Graph, after: Graph, start: float, seconds: float) -> None:
        self.passes.append((name, before, after, seconds))
        if self.status is not None:
            self.status.update(f"after pass {name} ...")

    def _passes(self) -> None:
        for name, before, after, seconds in self.passes:
            change = "unchanged" if after is before else f"{len(before.nodes)} -> {len(after.nodes)} nodes"
            self._print(f"    {name:<22}{1e3 * seconds:>9.2f} ms   {change}", "dim" if after is before else "")
        self.passes.clear()

    def end(self, result: Any, error: BaseException | None) -> None:
        if self.status is not None:
            self.status.stop()
            self.status = None
        if error is not None:
            self._print(f"failed after {1e3 * self.seconds:.1f} ms: {type(error).__name__}", "red")
            return
        programs = len(result.programs)
        summary = f"{programs} program{'s' * (programs != 1)}" if programs else "programs follow at the first call"
        self._print(f"done in {1e3 * self.seconds:.1f} ms: {summary}", "bold")
        for decision in self.context.decisions:
            self._print(f"  {decision}", "yellow")

    def _print(self, text: str, style: str = "") -> None:
        self.console.print(Text(visible(text), style=style), soft_wrap=True)


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
