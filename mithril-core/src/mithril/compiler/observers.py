"""Observers of a compilation, provided by plugins and notified when stages and passes end.

Observers are created when ``ml.compile`` starts and live as long as the compiled model.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Protocol

from mithril import plugins
from mithril.ir import Graph
from mithril.runtime import Watcher

if TYPE_CHECKING:
    from mithril.plugins import CompileContext


class Observer(Protocol):
    """The interface of observers: notified at the end of each stage, each pass and the compilation."""

    def stage(self, name: str, graph: Graph | None, start: float, seconds: float) -> None: ...

    def passed(self, name: str, before: Graph, after: Graph, start: float, seconds: float) -> None: ...

    def end(self, result: Any, error: BaseException | None) -> None: ...


class Observers:
    """The observers of one compilation."""

    def __init__(self, context: CompileContext) -> None:
        self.watching_now: list[Observer] = plugins.observers(context)
        self._mark = time.perf_counter()

    @property
    def watchers(self) -> tuple[Watcher, ...]:
        """Watchers of the model's calls, from the observers of its compilation."""
        return tuple(o.watcher for o in self.watching_now if hasattr(o, "watcher"))

    def stage(self, name: str, graph: Graph | None) -> None:
        """Notify observers that a stage has ended, which started at the end of the previous stage."""
        if self.watching_now:
            start, self._mark = self._mark, time.perf_counter()
            for observer in self.watching_now:
                observer.stage(name, graph, start, self._mark - start)
            self._mark = time.perf_counter()

    def passed(self, name: str, before: Graph, after: Graph, start: float, seconds: float) -> None:
        """Notify observers that a pass has ended."""
        for observer in self.watching_now:
            observer.passed(name, before, after, start, seconds)

    def begin(self) -> None:
        """Restart the clock before compiling another program."""
        self._mark = time.perf_counter()

    def end(self, result: Any, error: BaseException | None) -> None:
        for observer in self.watching_now:
            observer.end(result, error)
