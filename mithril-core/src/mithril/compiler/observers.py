"""What the core's own options show of a compilation: each an observer, told of stages and passes as plugins are.

An observer is chosen when ``ml.compile`` begins and lives as long as the compiled model, which may make more programs.
"""

from __future__ import annotations

import time
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from mithril.ir import Graph

if TYPE_CHECKING:
    from mithril.plugins.hookspecs import CompileContext
    from mithril.tools.trace_events import Recorder

# The option that chooses an observer -> where it lives.
OBSERVERS = {
    "verbose": "mithril.tools.show.verbose:Verbose",
    "dump_graph": "mithril.tools.show.dump:Dump",
    "trace_shapes": "mithril.tools.show.shape_trace:ShapeTrace",
    "save_intermediates": "mithril.tools.show.intermediates:Intermediates",
    "profile": "mithril.tools.show.timing:Timing",
}


class Observer(Protocol):
    """Told when a stage and a pass have ended, and how the compilation ended. ``seconds`` is what it took."""

    def __init__(self, context: CompileContext) -> None: ...

    def stage(self, name: str, graph: Graph | None, start: float, seconds: float) -> None: ...

    def passed(self, name: str, before: Graph, after: Graph, start: float, seconds: float) -> None: ...

    def end(self, result: Any, error: BaseException | None) -> None: ...


class Observers:
    """The observers of one compilation."""

    def __init__(self, context: CompileContext) -> None:
        options = context.options
        chosen = [home for option, home in OBSERVERS.items() if options[option]]
        self.watching_now = [_load(home)(context) for home in chosen]
        self._mark = time.perf_counter()

    @property
    def recorder(self) -> Recorder | None:
        """Where ``profile=True`` puts what it measures."""
        return next((o.recorder for o in self.watching_now if hasattr(o, "recorder")), None)

    def stage(self, name: str, graph: Graph | None) -> None:
        """A stage has ended; it began where the one before ended."""
        if self.watching_now:
            start, self._mark = self._mark, time.perf_counter()
            for observer in self.watching_now:
                observer.stage(name, graph, start, self._mark - start)
            self._mark = time.perf_counter()

    def passed(self, name: str, before: Graph, after: Graph, start: float, seconds: float) -> None:
        """A pass has ended."""
        for observer in self.watching_now:
            observer.passed(name, before, after, start, seconds)

    def begin(self) -> None:
        """Another program is about to be made: the time since the last one is nobody's."""
        self._mark = time.perf_counter()

    def end(self, result: Any, error: BaseException | None) -> None:
        for observer in self.watching_now:
            observer.end(result, error)


def _load(home: str) -> Any:
    module, _, name = home.partition(":")
    return getattr(import_module(module), name)
