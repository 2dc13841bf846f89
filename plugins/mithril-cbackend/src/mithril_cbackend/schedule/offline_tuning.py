"""``mithril_cbackend.tune_offline``: the templates' whole grid of schedules, searched for as long as one likes.

First each operation alone: all of its schedules, timed in turns, those that fall behind given up. Then the whole
program: what won alone must win there, too, beside what follows it and with the caches as the rest leaves them, else
the runner-up or the usual schedule stays. What is found is kept for ``optimization_level="high"`` and can be shipped.

TVM's own tuner is no part of this. It rearranges blocks; kernels of the templates are loops, and have none.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from mithril.base import OptionError, Store, time_interleaved
from mithril_cbackend.lowering.element.kernel_builder import Machine
from mithril_cbackend.program import compile_graph
from mithril_cbackend.program.executable import executables
from mithril_cbackend.schedule import tuning
from mithril_cbackend.schedule.schedules import Schedules
from mithril_cbackend.schedule.tuning import DEFAULT, Call, Operation

if TYPE_CHECKING:
    from mithril.runtime import CompiledModel

FINALISTS = 3  # of each operation, that the whole program is tried with
HOPELESS = 1.2  # times slower than the best
GAIN = 0.01  # of the whole program's time that another schedule must save
MIN_SECONDS = 0.1  # seconds for an operation or a race, however little time is given


def lower_quartile(times: Sequence[float]) -> float:
    """What a busy machine disturbs least, and one lucky call does not decide."""
    return sorted(times)[len(times) // 4]


@dataclass
class Row:
    """What was found for one operation."""

    operation: Operation
    tried: int
    usual: float  # seconds alone
    finalists: Sequence[tuple[str, float]]  # the best first, with their seconds alone
    chosen: str = DEFAULT

    def __str__(self) -> str:
        best, seconds = self.finalists[0]
        selection = "the usual one" if self.chosen == DEFAULT else f"'{self.chosen}'"
        timing = f"{1e6 * self.usual:.1f} us, '{best or 'the usual one'}' {1e6 * seconds:.1f} us of {self.tried}"
        return f"{self.operation.name} ({self.operation.count}x): alone {timing}; kept {selection}"


@dataclass
class TuningResult:
    """The schedules that won. Print it for what was tried; ``save`` writes them to be shipped."""

    schedules: Schedules
    usual_seconds: float
    seconds: float
    rows: Sequence[Row] = field(default_factory=list)

    @property
    def speedup(self) -> float:
        return self.usual_seconds / self.seconds

    def save(self, path: str | os.PathLike[str]) -> None:
        """For ``ml.CBackend(schedules=path)``, beside what the file already has."""
        self.schedules.save(path)

    def __str__(self) -> str:
        times = (
            f"{1e3 * self.usual_seconds:.3f} ms with the usual schedules, {1e3 * self.seconds:.3f} ms with those found"
        )
        return "\n".join([times, *(f"  {row}" for row in self.rows)])


def tune_offline(
    compiled: CompiledModel,
    *,
    seconds: float = 60.0,
    trials: int | None = None,
    store: Store | str | os.PathLike[str] | None = None,
) -> TuningResult:
    """Search the schedules of a model's newest program for about so many seconds.

    ``trials`` bounds how many schedules of each operation are tried. ``store`` is the cache folder in which level
    high finds what won; by default the one it uses itself.
    """
    if seconds <= 0 or (trials is not None and trials < 1):
        raise OptionError(f"tune_offline: nothing can be tried in {seconds} s with trials={trials}")
    executable = executables(compiled)[-1]
    machine = replace(executable.machine, schedules={})
    cache = store if isinstance(store, Store) else Store(store or compiled.options.get("cache_dir"))
    begin = time.perf_counter()
    operations = tuning.operations(executable.graph)
    work = sum(o.multiplications * o.count for o in operations.values())
    rows = [
        tune_operation(o, machine, seconds / 2 * o.multiplications * o.count / work, trials)
        for o in operations.values()
    ]
    result = tune_program(executable.graph, machine, rows, begin + seconds)
    for row in rows:
        tuning.save_cached(cache, row.operation.name, machine, row.chosen)
    return result


def tune_operation(operation: Operation, machine: Machine, seconds: float, trials: int | None) -> Row:
    """The fastest schedules of an operation by itself."""
    graph = tuning.single(operation.within, operation.node)
    calls = {DEFAULT: Call(graph, machine, compile_graph.compiled)}
    choices = list(dict.fromkeys([*operation.choices(machine), *operation.all_choices(machine)]))
    end = time.perf_counter() + seconds / 2
    for schedule in choices[:trials]:
        calls[schedule] = Call(graph, replace(machine, schedules={operation.name: schedule}), compile_graph.compiled)
        if time.perf_counter() > end:
            break
    times = time_interleaved(calls, seconds=max(MIN_SECONDS, seconds / 2), hopeless=HOPELESS, of=lower_quartile)
    order = sorted(times.items(), key=lambda item: item[1])
    return Row(operation, len(times) - 1, times[DEFAULT], order[:FINALISTS])


def tune_program(graph: Any, machine: Machine, rows: Sequence[Row], end: float) -> TuningResult:
    """The whole program with what won alone; then, while there is time, with each operation's other finalists."""

    def program(schedules: Mapping[str, str]) -> Call:
        return Call(
            graph, replace(machine, schedules={n: s for n, s in schedules.items() if s}), compile_graph.compiled
        )

    def race(calls: Mapping[str, Call]) -> dict[str, float]:
        return time_interleaved(
            calls, seconds=max(MIN_SECONDS, (end - time.perf_counter()) / (4 * len(rows) + 4)), of=lower_quartile
        )

    usual: dict[str, str] = {row.operation.name: DEFAULT for row in rows}
    best = {row.operation.name: row.finalists[0][0] for row in rows}
    calls = {"usual": program(usual), "best": program(best)}
    times = race(calls)
    if times["best"] >= times["usual"]:
        best, calls["best"] = usual, calls["usual"]
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
        row.chosen = best[row.operation.name]
    last = race(calls)
    if calls["best"] is calls["usual"]:
        last["best"] = last["usual"]
    machine = replace(machine, schedules={n: s for n, s in best.items() if s})
    return TuningResult(Schedules.of_machine(machine), last["usual"], last["best"], rows)
