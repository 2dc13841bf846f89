"""File of measured schedules, to be shipped with a program: by machine, the fastest schedule for each operation.

``mithril_cbackend.save_schedules("schedules.json", compiled)`` writes the schedules of ``optimization_level="high"``,
and ``ml.CBackend(schedules="schedules.json")`` compiles with them at every level, without measurements.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mithril.graph import OptionError
from mithril.system import files

if TYPE_CHECKING:
    from mithril.compiler import CompiledModel
    from mithril_cbackend.lowering.element.kernel_builder import Machine

FORMAT, VERSION = "mithril-cbackend schedules", 1
ByName = Mapping[str, str]  # operation with its sizes -> schedule


@dataclass(frozen=True)
class Schedules:
    """Schedules by machine and operation."""

    machines: Mapping[str, ByName] = field(default_factory=dict)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Schedules:
        """Read a file written by ``save``; raise OptionError for any other."""
        file = Path(path)
        try:
            data = json.loads(file.read_text())
        except OSError as error:
            raise OptionError(f"schedules: cannot read '{file}': {error.strerror or error}") from None
        except ValueError as error:
            raise OptionError(f"schedules: '{file}' is not a schedules file: {error}") from None
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            hint = "write one with mithril_cbackend.save_schedules"
            raise OptionError(f"schedules: '{file}' is not a schedules file", hint=hint)
        if data.get("version") != VERSION:
            raise OptionError(
                f"schedules: '{file}' has format version {data.get('version')}, expected version {VERSION}",
                hint="run tune-c again, or install the version of mithril-cbackend that wrote it",
            )
        machines: Any = data.get("machines")
        if not _by_name(machines, dict) or not all(_by_name(by_operation, str) for by_operation in machines.values()):
            raise OptionError(f"schedules: 'machines' of '{file}' must map machines to operations to schedules")
        return Schedules(machines)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the schedules, merged into an existing file."""
        file = Path(path)
        merged = Schedules.load(file).merged_with(self) if file.exists() else self
        data = {"format": FORMAT, "version": VERSION, "machines": merged.machines}
        files.write(file, json.dumps(data, indent=1, sort_keys=True) + "\n", "schedules")

    def merged_with(self, other: Schedules) -> Schedules:
        """Return the union, where schedules of `other` win."""
        names = {*self.machines, *other.machines}
        return Schedules({n: {**self.machines.get(n, {}), **other.machines.get(n, {})} for n in sorted(names)})

    @staticmethod
    def of_machine(machine: Machine) -> Schedules:
        """Return the schedules that a program was compiled with."""
        return Schedules({kind(machine): dict(machine.schedules)})


def _by_name(value: Any, kind: type) -> bool:
    return isinstance(value, dict) and all(isinstance(n, str) and isinstance(x, kind) for n, x in value.items())


def kind(machine: Machine) -> str:
    """Return the description of a machine that its schedules are stored under."""
    return f"{machine.cpu}, {machine.threads} threads, vectors of {machine.vector_bytes} bytes"


def save_schedules(path: str | os.PathLike[str], *compiled: CompiledModel) -> Schedules:
    """Write the schedules of all programs of these models, merged into an existing file."""
    from mithril_cbackend.program.executable import executables

    schedules = Schedules()
    for model in compiled:
        for executable in executables(model):
            schedules = schedules.merged_with(Schedules.of_machine(executable.machine))
    schedules.save(path)
    return schedules
