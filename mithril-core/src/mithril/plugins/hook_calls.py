"""Calls of the hooks that run during compilation: deciding hooks (passes, executables) and observing hooks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mithril.graph import Decisions, OptionError, PluginError
from mithril.plugins.hooks import hookimpl
from mithril.plugins.loader import Loader, Plugin
from mithril.plugins.specs import CompileContext, HardwareTarget, PipelineDraft, PluginWarning
from mithril.plugins.tables import answer_problem

if TYPE_CHECKING:
    from mithril.graph import Graph

Runner = Callable[[Any, "Graph", Any], "Graph"]


class LastAnswers:
    """The core's implementations of the two deciding hooks, called last: they run the caller's function."""

    def __init__(self) -> None:
        self.calls = threading.local()

    @hookimpl(trylast=True)
    def mithril_run_pass(self, pass_: Any, graph: Graph, context: Any) -> Any:
        return self.calls.stack[-1](pass_, graph, context)

    @hookimpl(trylast=True)
    def mithril_build(self, graph: Graph, backend: Any, target: HardwareTarget | None) -> Any:
        return self.calls.stack[-1](graph, backend, target)


class HookCalls:
    """Calls of deciding and observing hooks, with errors that name the plugin at fault."""

    loader: Loader
    _hooks: dict[str, Any]
    _last: LastAnswers

    def run_pass(self, pass_: Any, graph: Graph, context: Any, last: Runner) -> Graph:
        """Return the graph after ``pass_``: ``last(pass_, graph, context)`` inside the wrappers of plugins."""
        return self._decide("mithril_run_pass", last, pass_=pass_, graph=graph, context=context)  # type: ignore[no-any-return]

    def build(
        self, graph: Graph, backend: Any, target: HardwareTarget | None, last: Callable[[Graph, Any, Any], Any]
    ) -> Any:
        """Return the executable for ``graph``: ``last(graph, backend, target)`` inside the wrappers of plugins."""
        return self._decide("mithril_build", last, graph=graph, backend=backend, target=target)

    def _decider(self, name: str) -> Any:
        with self.loader.lock:
            self.loader.load_all()
            manager = self.loader.manager
            hook = getattr(manager.hook, name)
            # Without plugins that decide, pluggy is not entered at all: the common case is a plain call.
            if hook.get_hookimpls() and not manager.is_registered(self._last):
                manager.register(self._last, "mithril-core")
            self._hooks[name] = hook if hook.get_hookimpls() else None
            return self._hooks[name]

    def deciders(self) -> list[str]:
        """Return hook and origin of each plugin that implements a deciding hook."""
        hooks = ("mithril_run_pass", "mithril_build")
        self.loader.load_all()
        return [f"{hook} of {plugin.origin}" for hook in hooks for plugin, _ in self.loader.implementations(hook)]

    def _decide(self, name: str, last: Callable[..., Any], **arguments: Any) -> Any:
        hook = self._hooks[name] if name in self._hooks else self._decider(name)
        if hook is None:
            return last(*arguments.values())
        # A stack per thread, because a backend may compile parts while it builds a program.
        stack = self._last.calls.__dict__.setdefault("stack", [])
        stack.append(last)
        try:
            return hook(**arguments)
        except TimeoutError:
            raise  # the time limit of the compilation
        except Exception as error:
            plugin = self._raising_plugin(hook, error)
            if plugin is None:
                raise
            raise answer_problem(plugin, name, error).error() from error
        finally:
            stack.pop()

    def _raising_plugin(self, hook: Any, error: BaseException) -> Plugin | None:
        """Return the plugin whose implementation of ``hook`` raised, or None if the pass or backend did."""
        # By code objects of the traceback: the error may come from the pass or backend that a wrapper
        # has called.
        codes = {i.function.__code__: i.plugin_name for i in hook.get_hookimpls() if hasattr(i.function, "__code__")}
        trace, name = error.__traceback__, None
        while trace is not None:
            name = codes.get(trace.tb_frame.f_code, name)
            trace = trace.tb_next
        return next((plugin for plugin in self.loader.plugins if plugin.name == name), None)

    def advise(
        self,
        model: Any,
        backend: Any,
        options: Mapping[str, Any],
        user_options: Mapping[str, Any],
        decisions: Decisions,
    ) -> list[tuple[str, dict[str, Any]]]:
        """Return the options that plugins advise for a model, with the origin of each advice."""
        arguments = {"model": model, "backend": backend, "options": options, "user_options": user_options}
        advice = self._observe("mithril_advise", decisions, **arguments)
        return [(plugin.origin, dict(answer)) for plugin, answer in advice if answer]

    def observers(self, context: CompileContext) -> list[tuple[Plugin, Any]]:
        """Return the observers of a compilation, with their plugins."""
        answers = self._observe("mithril_observers", context.decisions, context=context)
        return [(plugin, one) for plugin, answer in answers for one in answer or ()]

    def compile_begin(self, context: CompileContext) -> None:
        """Notify observers that a compilation starts."""
        self._observe("mithril_compile_begin", context.decisions, context=context)

    def compile_stage(self, context: CompileContext, stage: str, graph: Graph | None) -> None:
        """Notify observers that a stage has ended."""
        self._observe("mithril_compile_stage", context.decisions, context=context, stage=stage, graph=graph)

    def compile_end(self, context: CompileContext, result: Any, error: BaseException | None) -> None:
        """Notify observers of the result of a compilation."""
        # strict=True replaces no error by another.
        decisions = context.decisions if error is None else Decisions()
        self._observe("mithril_compile_end", decisions, context=context, result=result, error=error)

    def _observe(self, hook: str, decisions: Decisions, **arguments: Any) -> list[tuple[Plugin, Any]]:
        """Call every implementation of a hook, and report exceptions after the last one."""
        answers, failures = [], []
        observers = self._hooks.get(hook)
        if observers is None:
            self.loader.load_all()
            observers = self._hooks[hook] = self.loader.implementations(hook)
        for plugin, implementation in observers:
            with plugin.observing(hook, arguments.get("graph")):
                try:
                    answers.append((plugin, implementation(**arguments)))
                except (TimeoutError, OptionError):
                    raise  # the time limit of the compilation, or an invalid option of the user
                except Exception as cause:
                    failures.append((plugin, hook, cause))
        if failures:
            self.report(failures, decisions)
        return answers

    def report(self, failures: Sequence[tuple[Plugin, str, Exception]], decisions: Decisions) -> None:
        """Record exceptions of observers: errors under ``strict=True``, else a warning for the first of each kind."""
        for plugin, hook, cause in failures:
            problem = answer_problem(plugin, hook, cause)
            decisions.record("observer", problem.line, warning=PluginWarning, warn=problem not in plugin.problems)
            self.loader.problem(plugin, problem)

    def amend_pipeline(self, draft: PipelineDraft, target: HardwareTarget | None, level: str) -> PipelineDraft:
        """Collect the changes of all plugins in ``draft``; raise PluginError if two plugins conflict."""
        self.loader.load_all()
        decided_by: dict[str, tuple[Plugin, str]] = {}  # pass -> plugin and change
        for plugin, implementation in self.loader.implementations("mithril_amend_pipeline"):
            plugin_draft = PipelineDraft(draft.names)
            try:
                implementation(draft=plugin_draft, target=target, level=level)
            # The user's time limit for compiling has ended, which is not the plugin's mistake.
            except TimeoutError:
                raise
            except Exception as cause:
                raise answer_problem(plugin, "mithril_amend_pipeline", cause).error() from cause
            fates = dict.fromkeys(plugin_draft.removed, "leave it out") | {
                name: f"run '{by}' instead" for name, by in plugin_draft.replaced.items()
            }
            for name, fate in fates.items():
                other, other_fate = decided_by.setdefault(name, (plugin, fate))
                if other_fate != fate:
                    raise PluginError(
                        f"two plugins disagree about the pass '{name}'",
                        facts=[f"{other.origin}: {other_fate}", f"{plugin.origin}: {fate}"],
                        hint=f"set MITHRIL_DISABLE_PLUGINS={plugin.name} to leave one of them out",
                    )
            verbs = {"add": plugin_draft.added, "leave out": plugin_draft.removed}
            changes = [f"{verb} '{name}'" for verb, names in verbs.items() for name in names]
            changes += [f"run '{by}' for '{name}'" for name, by in plugin_draft.replaced.items()]
            if changes:
                draft.changes.append(f"passes amended by {plugin.origin}: {', '.join(changes)}")
            draft.added += [name for name in plugin_draft.added if name not in draft.added]
            draft.removed += [name for name in plugin_draft.removed if name not in draft.removed]
            draft.replaced |= plugin_draft.replaced
        return draft
