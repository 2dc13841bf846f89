"""Plugins that take long in a compilation are named: on stderr while they run, and in the error of ``timeout=``.

A thread samples the stack of the compiling thread; without plugins of third parties there is no thread. No hook is
instrumented, so passes, deciders, lowerings, layers and observers are all covered, and cost nothing.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

from mithril.backend import third_parties
from mithril.plugins import Plugin

SAMPLES = 10  # per limit

# Functions of the core that call code of plugins, and the description of that code from their local variables.
CALLERS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "PassManager.run_one": lambda v: f"pass '{v['one'].name}'",
    "plugin_expression": lambda v: f"lowering of '{v['lowering'].op}' on '{v['lowering'].backend}'",
    "by_plugin": lambda v: f"lowering of '{v['lowering'].op}' on '{v['lowering'].backend}'",
    "PluginLowering.applies": lambda v: f"condition of the lowering of '{v['self'].op}' on '{v['self'].backend}'",
    "Observers._notify": lambda v: f"observer '{type(v['observer']).__name__}.{v['event']}'",
    "PluginSource.graph": lambda v: v["self"].origin.split(" by ")[0],
    "Context.run": lambda v: f"layer '{v['path']}'",
}


@dataclass(frozen=True)
class Activity:
    """Code of a plugin that is running: ``entry`` is its outermost frame."""

    plugin: Plugin
    entry: FrameType
    part: str
    place: str

    def __str__(self) -> str:
        return f"{self.part} of plugin '{self.plugin.name}' of {self.plugin.origin}"


def activity(frame: FrameType | None, root: FrameType | None, owners: Mapping[str, Plugin]) -> Activity | None:
    """Return the plugin code that runs in ``frame`` or called it, inside the frame ``root``, or None."""
    plugin, entry, place = None, None, ""
    while frame is not None and frame is not root:
        owner = owners.get(frame.f_globals.get("__name__", "").partition(".")[0])
        if owner is not None and plugin is None:
            plugin, place = owner, f"{frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_name}"
        if owner is not None and owner is plugin:
            entry = frame
        frame = frame.f_back
    if plugin is None or entry is None:
        return None
    return Activity(plugin, entry, _part(entry, root), place)


def _part(entry: FrameType, root: FrameType | None) -> str:
    if entry.f_code.co_name.startswith("mithril_"):
        return f"hook '{entry.f_code.co_name}'"
    caller = entry.f_back
    while caller is not None and caller is not root:
        describe = CALLERS.get(caller.f_code.co_qualname)
        if describe is not None and caller.f_globals.get("__name__", "").startswith("mithril"):
            return describe(caller.f_locals)
        caller = caller.f_back
    return f"function '{entry.f_code.co_name}'"


class PluginWatch:
    """The observation of one thread while it compiles. ``limit`` and ``timeout`` are in seconds."""

    def __init__(self, limit: float | None, timeout: float | None = None) -> None:
        self.limit = limit
        self.timeout = timeout
        self.interval = min((s for s in (limit, timeout) if s is not None), default=0.0) / SAMPLES
        self.seconds: dict[str, float] = {}  # by activity, its longest run
        self._stop: threading.Event | None = None
        self._root: FrameType | None = None
        self._owners: Mapping[str, Plugin] = {}

    def start(self) -> None:
        """Watch the function that calls the caller, a deadline, unless there are no plugins of third parties."""
        self.seconds.clear()
        self._owners = third_parties()
        if self.interval and self._owners:
            self._root = sys._getframe(2)
            self._stop = threading.Event()
            arguments = (threading.get_ident(), self._root, self._stop)
            threading.Thread(target=self._run, args=arguments, name="mithril-plugin-watch", daemon=True).start()

    def stop(self) -> None:
        if self._stop is not None:
            self._stop.set()
        self._stop = self._root = None

    def describe(self, frame: FrameType | None = None) -> list[str]:
        """Return the plugin in ``frame``, or the one that took longest until now, as a fact of an error."""
        current = activity(frame, self._root, self._owners) if frame is not None else None
        if current is not None:
            return [f"in {current}", current.place]
        slowest = max(self.seconds, key=self.seconds.__getitem__, default=None)
        return [] if slowest is None else [f"{slowest} ran for {self.seconds[slowest]:.2g} seconds"]

    def _run(self, thread: int, root: FrameType, stop: threading.Event) -> None:
        entry, since, reported = None, 0.0, set()
        end = time.monotonic() + self.timeout if self.timeout is not None else float("inf")
        while not stop.wait(self.interval):
            current = activity(sys._current_frames().get(thread), root, self._owners)
            if current is None or current.entry is not entry:
                entry, since = current and current.entry, time.monotonic()
                continue
            elapsed = time.monotonic() - since
            name = str(current)
            self.seconds[name] = max(elapsed, self.seconds.get(name, 0.0))
            is_slow, is_late = self.limit is not None and elapsed >= self.limit, time.monotonic() > end
            if (is_slow or is_late) and name not in reported:
                reported.add(name)
                # An alarm interrupts the main thread only, and not a plugin that catches every exception.
                fault = (
                    f"runs on after timeout={self.timeout:g}"
                    if is_late
                    else f"takes longer than {self.limit:g} seconds"
                )
                text = f"mithril: {name} {fault} ({current.place}); {current.plugin.disable_hint()}"
                print(text, file=sys.stderr, flush=True)
