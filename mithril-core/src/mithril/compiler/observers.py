"""Observers of a compilation, provided by plugins and notified when stages and passes end.

Observers are created when ``ml.compile`` starts and live as long as the compiled model.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from mithril import plugins
from mithril.compiler.deadline import Deadline
from mithril.compiler.program import Program
from mithril.compiler.watching import Watcher
from mithril.graph import Decisions, Graph, MithrilError, log

if TYPE_CHECKING:
    from mithril.plugins import CompileContext, Plugin


class Observer(Protocol):
    """The interface of observers: notified at the end of each stage, each pass and the compilation."""

    def stage(self, name: str, graph: Graph | None, start: float, seconds: float) -> None: ...

    def passed(self, name: str, before: Graph, after: Graph, start: float, seconds: float) -> None: ...

    def end(self, result: Any, error: BaseException | None) -> None: ...


class Progress:
    """The progress of work that is not reported: only the time limit is checked."""

    def __init__(self, deadline: Deadline) -> None:
        self.deadline = deadline

    def restart(self) -> None:
        """Restart the clock before compiling another program."""

    def stage(self, name: str, graph: Graph | None) -> None:
        """Note that a stage has ended, which started at the end of the previous stage."""
        self.deadline.check(f"step '{name}'")

    def passed(self, name: str, before: Graph, after: Graph, start: float, seconds: float) -> None:
        """Note that a pass has ended."""


class Observers(Progress):
    """The hooks ``mithril_compile_*`` and the observers of one compilation, which its progress is reported to."""

    def __init__(self, context: CompileContext, deadline: Deadline) -> None:
        super().__init__(deadline)
        self.context = context
        self.watching_now: list[tuple[Plugin, Observer]] = plugins.observers(context)
        self._mark = self._begun = time.perf_counter()

    @property
    def watchers(self) -> tuple[Watcher, ...]:
        """Watchers of the model's calls, from the observers of its compilation."""
        return tuple(o.watcher for _, o in self.watching_now if hasattr(o, "watcher"))

    @property
    def _name(self) -> str:
        model = self.context.model
        return getattr(model, "name", None) or type(model).__name__

    def begin(self) -> None:
        """Report that the compilation starts."""
        self._begun = time.perf_counter()
        plugins.compile_begin(self.context)

    def restart(self) -> None:
        self._mark = time.perf_counter()

    def stage(self, name: str, graph: Graph | None) -> None:
        super().stage(name, graph)
        if self.watching_now:
            start, self._mark = self._mark, time.perf_counter()
            self._notify("stage", name, graph, start, self._mark - start)
            self._mark = time.perf_counter()  # the time of observers belongs to no stage
        plugins.compile_stage(self.context, name, graph)

    def passed(self, name: str, before: Graph, after: Graph, start: float, seconds: float) -> None:
        self._notify("passed", name, before, after, start, seconds)
        if after is not before:
            log("debug", f"pass {name}: {len(before.nodes)} to {len(after.nodes)} operations in {1e3 * seconds:.2f} ms")

    def built(self, program: Program) -> None:
        """Give a new program to the observers that have a method ``built``."""
        log("info", f"built {program!r} of '{self._name}' for {self.context.backend.name}")
        self._notify("built", program, among=[o for o in self.watching_now if hasattr(o[1], "built")])

    def end(self, result: Any, error: BaseException | None) -> None:
        """Report the compiled model, or the exception that the compilation raises."""
        outcome = "compiled" if error is None else f"{type(error).__name__} in the compilation of"
        seconds = time.perf_counter() - self._begun
        log("info", f"{outcome} '{self._name}' for {self.context.backend.name} in {1e3 * seconds:.1f} ms")
        self._notify("end", result, error, decisions=self.context.decisions if error is None else Decisions())
        plugins.compile_end(self.context, result, error)

    def _notify(
        self,
        event: str,
        *arguments: Any,
        among: Sequence[tuple[Plugin, Observer]] | None = None,
        decisions: Decisions | None = None,
    ) -> None:
        observers = self.watching_now if among is None else among
        if not observers:
            return
        failures = []
        graphs = [x for x in arguments if isinstance(x, Graph)]
        for plugin, observer in observers:
            hook = f"mithril_observers: {type(observer).__name__}.{event}"
            with plugin.observing(hook, *graphs):
                try:
                    getattr(observer, event)(*arguments)
                except MithrilError as error:  # a refusal, such as a path that cannot be written
                    raise error.with_facts(f"in an observer of {plugin.origin}") from None
                except Exception as cause:
                    failures.append((plugin, hook, cause))
        plugins.report(failures, self.context.decisions if decisions is None else decisions)
