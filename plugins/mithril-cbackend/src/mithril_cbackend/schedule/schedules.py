"""Schedules found by measuring, as a file that goes where a program goes: by kind of machine, what won for which sizes.

``mithril_cbackend.save_schedules("schedules.json", compiled)`` writes what ``optimization_level="high"`` has found, and
``ml.CBackend(schedules="schedules.json")`` compiles by it at every level without measuring anything.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mithril.base import OptionError, files

if TYPE_CHECKING:
    from mithril.runtime import CompiledModel
    from mithril_cbackend.lowering.element.kernel_builder import Machine

FORMAT, VERSION = "mithril-cbackend schedules", 1
ByName = Mapping[str, str]  # of an operation with its sizes: the schedule


@dataclass(frozen=True)
class Schedules:
    """By kind of machine."""

    machines: Mapping[str, ByName] = field(default_factory=dict)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Schedules:
        """What ``save`` wrote; anything else is an error."""
        file = Path(path)
        try:
            data = json.loads(file.read_text())
        except OSError as error:
            raise OptionError(f"schedules: '{file}' cannot be read: {error.strerror or error}") from None
        except ValueError as error:
            raise OptionError(f"schedules: '{file}' is no file of schedules: {error}") from None
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            hint = "mithril_cbackend.save_schedules writes such a file"
            raise OptionError(f"schedules: '{file}' is no file of schedules", hint=hint)
        if data.get("version") != VERSION:
            raise OptionError(
                f"schedules: '{file}' has version {data.get('version')} of the format, this mithril-cbackend reads"
                f" version {VERSION}",
                hint="search again, or install the mithril-cbackend that wrote it",
            )
        machines: Any = data.get("machines")
        if not _by_name(machines, dict) or not all(_by_name(by_operation, str) for by_operation in machines.values()):
            raise OptionError(f"schedules: '{file}' does not say which schedules are for which machine")
        return Schedules(machines)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write them; what a file of this name has for other machines and sizes stays."""
        file = Path(path)
        merged = Schedules.load(file).merged_with(self) if file.exists() else self
        data = {"format": FORMAT, "version": VERSION, "machines": merged.machines}
        files.write(file, json.dumps(data, indent=1, sort_keys=True) + "\n", "schedules")

    def merged_with(self, other: Schedules) -> Schedules:
        """Both; where both have one, that of the others."""
        names = {*self.machines, *other.machines}
        return Schedules({n: {**self.machines.get(n, {}), **other.machines.get(n, {})} for n in sorted(names)})

    @staticmethod
    def of_machine(machine: Machine) -> Schedules:
        """Those that a program was compiled by."""
        return Schedules({kind(machine): dict(machine.schedules)})


def _by_name(value: Any, kind: type) -> bool:
    return isinstance(value, dict) and all(isinstance(n, str) and isinstance(x, kind) for n, x in value.items())


def kind(machine: Machine) -> str:
    """What machines have in common for which the same schedules are best."""
    return f"{machine.cpu}, {machine.threads} threads, vectors of {machine.vector_bytes} bytes"


def save_schedules(path: str | os.PathLike[str], *compiled: CompiledModel) -> Schedules:
    """Write the schedules of all programs of these models, beside those that the file already has."""
    from mithril_cbackend.program.executable import executables

    schedules = Schedules()
    for model in compiled:
        for executable in executables(model):
            schedules = schedules.merged_with(Schedules.of_machine(executable.machine))
    schedules.save(path)
    return schedules
