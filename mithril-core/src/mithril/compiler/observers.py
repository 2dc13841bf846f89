"""Observers of a compilation, which plugins bring: told when stages and passes end.

An observer is chosen when ``ml.compile`` begins and lives as long as the compiled model, which may make more programs.
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
    """Told when a stage and a pass have ended, and how the compilation ended. ``seconds`` is what it took."""

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
        """The watchers of the model's calls that observers of its compilation bring along."""
        return tuple(o.watcher for o in self.watching_now if hasattr(o, "watcher"))

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
