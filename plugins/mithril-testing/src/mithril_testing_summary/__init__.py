"""Pytest plugin that ends a run with one line per class of the kit: how many operations it checked, in how many cases.

Pytest loads it in every run, as the controlling process of pytest-xdist collects no tests and could not ask for it:
it imports nothing but pytest. Workers hand their tallies over when they end.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

NEEDS_ROWS, EXCLUDED = "also needs rows for", "the conditions of the lowerings exclude"  # reasons of partial backends
KEY, SECONDS = "mithril_conformance", "mithril_processor_seconds"


@dataclass
class Tally:
    """The operations that one class of the kit is about, and the checks that have run."""

    title: str
    operations: list[str]
    exempt: dict[str, str] = field(default_factory=dict)  # operations the class does not try, and why
    checked: list[str] = field(default_factory=list)
    cases: int = 0
    excluded: int = 0  # cases skipped, as the condition of a lowering excludes a call of them
    ways: dict[str, str] = field(default_factory=dict)  # operation -> how the backend runs it

    def add(self, names: Collection[str], cases: int = 1) -> None:
        """Count cases that have run, about some operations."""
        self.cases += cases
        self.checked += [n for n in names if n in self.operations and n not in self.checked]

    def __str__(self) -> str:
        missed = [n for n in self.operations if n not in self.checked]
        counts = ", ".join(f"{n} {way}" for way, n in sorted(Counter(self.ways.values()).items(), reverse=True))
        line = f"{self.title}: checked {len(self.checked)} of {len(self.operations)} operations"
        line += f" ({counts}), {self.cases} cases" if counts else f", {self.cases} cases"
        if self.excluded:
            line += f", {self.excluded} skipped by conditions of lowerings"
        if not missed:
            return line
        shown = [f"{n} ({self.exempt[n]})" if n in self.exempt else n for n in missed[:12]]
        more = f" and {len(missed) - 12} more" if len(missed) > 12 else ""
        return f"{line}; not checked: {', '.join(shown)}{more}"


tallies: dict[str, Tally] = {}  # by the class's module and name
worker_seconds: list[float] = []  # processor time of workers that have ended


verdicts: Counter[str] = Counter()  # of the cases of the kit: "passed", "failed", and "partial" as declared


def pytest_addoption(parser: pytest.Parser) -> None:
    help_text = "write the counts of the conformance kit as JSON, for mithril plugins verify"
    parser.addoption("--kit-summary", metavar="FILE", help=help_text)
    help_text = "make all checks of the conformance kit for composites too that a backend runs by their bodies"
    parser.addoption("--kit-bodies", action="store_true", help=help_text)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Mark the cases of the kit, whose reports the controlling process of pytest-xdist receives."""
    classes = getattr(getattr(item, "cls", None), "__mro__", ())
    if any(c.__module__.partition(".")[0] == "mithril_testing" for c in classes):
        item.user_properties.append((KEY, True))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Count a case of the kit once; one that does not apply to a complete backend either counts as none."""
    if (KEY, True) not in map(tuple, report.user_properties):
        return
    is_partial = hasattr(report, "wasxfail") or any(text in report.longreprtext for text in (NEEDS_ROWS, EXCLUDED))
    if report.skipped and is_partial:
        verdicts["partial"] += 1
    elif report.failed or (report.passed and report.when == "call"):
        verdicts[report.outcome] += 1


def merge(tallies_of_worker: Mapping[str, Mapping[str, Any]]) -> None:
    """Add the tallies of another process; all processes collect the same classes."""
    for key, other in tallies_of_worker.items():
        tally = tallies.setdefault(key, Tally(other["title"], other["operations"], other["exempt"]))
        tally.add(other["checked"], other["cases"])
        tally.ways.update(other["ways"])
        tally.excluded += other["excluded"]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hand the tallies of a worker over, and write the counts of the run."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output[KEY] = {key: asdict(tally) for key, tally in tallies.items()}
        output[SECONDS] = time.process_time()
    elif path := session.config.getoption("--kit-summary"):
        counts = {verdict: verdicts[verdict] for verdict in ("passed", "failed", "partial")}
        Path(path).write_text(json.dumps(counts))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take the tallies of a worker that has ended; one that crashed leaves none."""
    output = getattr(node, "workeroutput", {})
    merge(output.get(KEY, {}))
    worker_seconds.append(output.get(SECONDS, 0.0))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print a line for each class, and the processor time of the run."""
    if tallies:
        terminalreporter.section("conformance")
        for tally in tallies.values():
            terminalreporter.line(str(tally))
        terminalreporter.line(f"processor time: {time.process_time() + sum(worker_seconds):.0f} s")
