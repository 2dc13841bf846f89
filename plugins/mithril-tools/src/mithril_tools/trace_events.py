"""Recorded events of two sections, compile and run, and their Chrome trace."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mithril.graph import OptionError
from mithril.system import files

SECTIONS = ("compile", "run")


@dataclass(frozen=True, slots=True)
class Event:
    """A timed event: a stage, a pass, a call, or an operation."""

    section: str
    name: str
    start: float  # seconds on the clock of time.perf_counter
    seconds: float
    layer: str = ""
    kind: str = ""  # stage, pass, call, operation
    info: Mapping[str, Any] = field(default_factory=dict)


class Recorder:
    """A collection of events. ``path`` is the file of ``write``."""

    def __init__(self, path: str | os.PathLike[str] | None = None, *, stepped: bool = True) -> None:
        self.path = path
        self.stepped = stepped  # whether calls are also run operation by operation
        self.events: list[Event] = []
        self._begin = time.perf_counter()

    def add(
        self, section: str, name: str, start: float, seconds: float, layer: str = "", kind: str = "", **info: Any
    ) -> None:
        self.events.append(Event(section, name, start, seconds, layer, kind, info))

    def of(self, section: str, kind: str) -> list[Event]:
        return [e for e in self.events if e.section == section and e.kind == kind]

    def chrome(self) -> dict[str, Any]:
        """Return the events in Chrome's trace format: one process per section, one row per kind of event."""
        rows: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "pid": 1 + k, "tid": 0, "args": {"name": section}}
            for k, section in enumerate(SECTIONS)
        ]
        kinds = sorted({e.kind for e in self.events})
        for e in self.events:
            rows.append(
                {
                    "ph": "X",
                    "name": e.name,
                    "cat": e.kind,
                    "pid": 1 + SECTIONS.index(e.section),
                    "tid": kinds.index(e.kind),
                    "ts": (e.start - self._begin) * 1e6,
                    "dur": e.seconds * 1e6,
                    "args": {**({"layer": e.layer} if e.layer else {}), **e.info},
                }
            )
        return {"traceEvents": rows, "displayTimeUnit": "ms"}

    def write(self, path: str | os.PathLike[str] | None = None) -> None:
        """Write the trace to a file that chrome://tracing and Perfetto open."""
        target = path if path is not None else self.path
        if target is None:
            raise OptionError("there is no file to write the profile to", hint='recorder.write("profile.json")')
        files.write(target, json.dumps(self.chrome()), "profile_output")
