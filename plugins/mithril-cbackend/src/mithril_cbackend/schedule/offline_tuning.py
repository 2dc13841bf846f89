"""``mithril_cbackend.tune_offline``: search of the templates' full grid of schedules within a time limit.

First each operation alone: all of its schedules are timed alternately, and slow ones are dropped early. Then the full
program: the fastest schedules must also be faster there, with its fusion and cache state, otherwise a runner-up or the
default is used. The results are cached for ``optimization_level="high"`` and can be shipped as a file.

TVM's own tuner is not used: it transforms blocks of TVM's scheduling language, and the templates generate plain loops.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from mithril.graph import OptionError
from mithril.system import Store, time_interleaved
from mithril_cbackend.lowering.element.kernel_builder import Machine
from mithril_cbackend.program import compile_graph
from mithril_cbackend.program.executable import executables
from mithril_cbackend.schedule import tuning
from mithril_cbackend.schedule.schedules import Schedules
from mithril_cbackend.schedule.tuning import DEFAULT, Call, Operation

if TYPE_CHECKING:
    from mithril.compiler import CompiledModel

FINALISTS = 3  # schedules of each operation to try in the full program
HOPELESS = 1.2  # slowdown relative to the best above which a schedule is dropped
GAIN = 0.01  # fraction of the program's time that another schedule must save
MIN_SECONDS = 0.1  # lower limit for an operation or a comparison, whatever the time limit


def lower_quartile(times: Sequence[float]) -> float:
    """Return the lower quartile: robust against a noisy host and against single fast calls."""
    return sorted(times)[len(times) // 4]


@dataclass
class Row:
    """The results of one operation."""

    operation: Operation
    tried: int
    default: float  # seconds of the default schedule, measured alone
    finalists: Sequence[tuple[str, float]]  # schedules and their seconds, measured alone, the fastest first
    selected: str = DEFAULT

    def __str__(self) -> str:
        best, seconds = self.finalists[0]
        selection = "the default" if self.selected == DEFAULT else f"'{self.selected}'"
        timing = f"default {1e6 * self.default:.1f} us, best of {self.tried}"
        timing += f" '{best or 'default'}' {1e6 * seconds:.1f} us"
        return f"{self.operation.name} ({self.operation.count}x): alone {timing}; selected {selection}"


@dataclass
class TuningResult:
    """The fastest schedules. Print it for the measurements; ``save`` writes a file to ship."""

    schedules: Schedules
    default_seconds: float
    seconds: float
    rows: Sequence[Row] = field(default_factory=list)

    @property
    def speedup(self) -> float:
        return self.default_seconds / self.seconds

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the schedules for ``ml.CBackend(schedules=path)``, merged into an existing file."""
        self.schedules.save(path)

    def __str__(self) -> str:
        times = (
            f"{1e3 * self.default_seconds:.3f} ms by default, {1e3 * self.seconds:.3f} ms with the selected schedules"
        )
        return "\n".join([times, *(f"  {row}" for row in self.rows)])


def tune_offline(
    compiled: CompiledModel,
    *,
    seconds: float = 60.0,
    trials: int | None = None,
    store: Store | str | os.PathLike[str] | None = None,
) -> TuningResult:
    """Search schedules for a model's latest program for about `seconds`.

    ``trials`` limits the schedules per operation. ``store`` is the cache directory from which level high reads the
    results; by default its own.
    """
    if seconds <= 0 or (trials is not None and trials < 1):
        raise OptionError(f"tune_offline: seconds={seconds} and trials={trials} must be positive")
    executable = executables(compiled)[-1]
    # Without its present schedules, or the default that others are compared with would be an earlier
    # winner.
    machine = replace(executable.machine, schedules={})
    cache = store if isinstance(store, Store) else Store(store or compiled.options["cache_dir"])
    begin = time.perf_counter()
    operations = tuning.operations(executable.graph)
    work = sum(o.multiplications * o.count for o in operations.values())
    rows = [
        # Half of the time for operations alone, by their share of the work; the other half for the
        # program, where caches are shared and another schedule may win.
        tune_operation(o, machine, seconds / 2 * o.multiplications * o.count / work, trials)
        for o in operations.values()
    ]
    result = tune_program(executable.graph, machine, rows, begin + seconds)
    for row in rows:
        tuning.save_cached(cache, row.operation.name, machine, row.selected)
    return result


def tune_operation(operation: Operation, machine: Machine, seconds: float, trials: int | None) -> Row:
    """Return the fastest schedules of an operation, measured alone."""
    graph = tuning.single(operation.within, operation.node)
    calls = {DEFAULT: Call(graph, machine, compile_graph.compiled)}
    choices = list(dict.fromkeys([*operation.choices(machine), *operation.all_choices(machine)]))
    end = time.perf_counter() + seconds / 2
    for schedule in choices[:trials]:
        calls[schedule] = Call(graph, replace(machine, schedules={operation.name: schedule}), compile_graph.compiled)
        if time.perf_counter() > end:
            break
    seconds = max(MIN_SECONDS, seconds / 2)
    times = time_interleaved(calls, tuning.finished, seconds=seconds, hopeless=HOPELESS, of=lower_quartile)
    order = sorted(times.items(), key=lambda item: item[1])
    return Row(operation, len(times) - 1, times[DEFAULT], order[:FINALISTS])


def tune_program(graph: Any, machine: Machine, rows: Sequence[Row], end: float) -> TuningResult:
    """Measure the full program with the fastest schedules, then, while time is left, with the other finalists."""

    def program(schedules: Mapping[str, str]) -> Call:
        return Call(
            graph, replace(machine, schedules={n: s for n, s in schedules.items() if s}), compile_graph.compiled
        )

    def race(calls: Mapping[str, Call]) -> dict[str, float]:
        seconds = max(MIN_SECONDS, (end - time.perf_counter()) / (4 * len(rows) + 4))
        return time_interleaved(calls, tuning.finished, seconds=seconds, of=lower_quartile)

    default: dict[str, str] = {row.operation.name: DEFAULT for row in rows}
    best = {row.operation.name: row.finalists[0][0] for row in rows}
    calls = {"default": program(default), "best": program(best)}
    times = race(calls)
    if times["best"] >= times["default"]:
        best, calls["best"] = default, calls["default"]
    for row in rows:
        name = row.operation.name
        for other in dict.fromkeys([*(n for n, _ in row.finalists), DEFAULT]):
            if other == best[name] or time.perf_counter() > end:
                continue
            changed = {**best, name: other}
            call = program(changed)
            seconds = race({"best": calls["best"], "other": call})
            if seconds["other"] < (1 - GAIN) * seconds["best"]:
                best, calls["best"] = changed, call
    for row in rows:
        row.selected = best[row.operation.name]
    last = race(calls)
    if calls["best"] is calls["default"]:
        last["best"] = last["default"]
    machine = replace(machine, schedules={n: s for n, s in best.items() if s})
    return TuningResult(Schedules.of_machine(machine), last["default"], last["best"], rows)
