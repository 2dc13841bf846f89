"""Progress of training: a bar on a terminal, a line per epoch (and at intervals) in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from html import escape
from importlib import import_module
from typing import Any

from mithril_train.loop.history import line

QUIET = 30.0  # seconds between lines of a log inside an epoch
LOOK = 0.2  # seconds between reads of the loss, each of which waits for the device


class Progress:
    """Progress without output."""

    def epoch(self, epoch: int, epochs: int, count: int | None, done: int) -> None:
        """Handle the start of an epoch."""

    def step(self, report: Any) -> None:
        """Handle the end of a batch."""

    def row(self, epoch: int, epochs: int, row: Mapping[str, float]) -> None:
        """Handle the end of an epoch."""

    def message(self, text: str) -> None:
        """Show a message."""

    def close(self) -> None:
        """Handle the end of training."""


class Lines(Progress):
    """Progress as plain lines."""

    def __init__(self, out: Any = None) -> None:
        self.out = out or sys.stderr
        self.head = ""
        self.begun = self.last_output = time.monotonic()
        self.done = 0
        self.count: int | None = None

    def epoch(self, epoch: int, epochs: int, count: int | None, done: int) -> None:
        self.head, self.count, self.done = f"epoch {epoch}/{epochs}", count, done
        self.begun = self.last_output = time.monotonic()

    def step(self, report: Any) -> None:
        self.done += 1
        now = time.monotonic()
        if now - self.last_output >= QUIET:
            self.last_output = now
            total = f"/{self.count}" if self.count else ""
            print(f"{self.head}  batch {self.done}{total}  loss {report['loss']:.4g}", file=self.out, flush=True)

    def row(self, epoch: int, epochs: int, row: Mapping[str, float]) -> None:
        seconds = time.monotonic() - self.begun
        self.message(f"{self.head}  {line(row)}  ({seconds:.1f} s)")

    def message(self, text: str) -> None:
        print(text, file=self.out, flush=True)


class Bar(Progress):
    """Progress as a bar, drawn by rich."""

    def __init__(self, console: Any = None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress as Rich, TextColumn, TimeRemainingColumn

        self.rich = Rich(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[loss]}"),
            console=console or Console(stderr=True),
            transient=True,
        )
        self.rich.start()
        self.task: Any = None
        self.looked = 0.0

    def epoch(self, epoch: int, epochs: int, count: int | None, done: int) -> None:
        if self.task is not None:
            self.rich.remove_task(self.task)
        self.task = self.rich.add_task(f"epoch {epoch}/{epochs}", total=count, completed=done, loss="")

    def step(self, report: Any) -> None:
        now = time.monotonic()
        if now - self.looked >= LOOK:
            self.looked = now
            self.rich.update(self.task, advance=1, loss=f"loss {report['loss']:.4g}")
        else:
            self.rich.advance(self.task)

    def row(self, epoch: int, epochs: int, row: Mapping[str, float]) -> None:
        self.message(f"epoch {epoch}/{epochs}  {line(row)}")

    def message(self, text: str) -> None:
        self.rich.console.print(text, highlight=False)

    def close(self) -> None:
        self.rich.stop()


class NotebookBar(Progress):
    """Progress as a bar in the output of a notebook cell, above the rows of the epochs."""

    def __init__(self, display: Any) -> None:
        self.lines: list[str] = []
        self.head, self.done, self.count = "", 0, 0
        self.loss = ""
        self.updated = 0.0
        self.handle = display(self._html(), display_id=True)

    def epoch(self, epoch: int, epochs: int, count: int | None, done: int) -> None:
        self.head, self.count, self.done = f"epoch {epoch}/{epochs}", count or 0, done

    def step(self, report: Any) -> None:
        self.done += 1
        now = time.monotonic()
        if now - self.updated >= LOOK:
            self.updated, self.loss = now, f"loss {report['loss']:.4g}"
            self._show()

    def row(self, epoch: int, epochs: int, row: Mapping[str, float]) -> None:
        self.message(f"epoch {epoch}/{epochs}  {line(row)}")

    def message(self, text: str) -> None:
        self.lines.append(text)
        self._show()

    def close(self) -> None:
        self.head = ""
        self._show()

    def _show(self) -> None:
        self.handle.update(self._html())

    def _html(self) -> Any:
        total = f"/{self.count}" if self.count else ""
        size = f'max="{self.count}" value="{self.done}"' if self.count else ""
        bar = f"{self.head} <progress {size}></progress> {self.done}{total} {escape(self.loss)}" if self.head else ""
        return import_module("IPython.display").HTML(f"<pre>{escape(chr(10).join(self.lines))}</pre>{bar}")


def notebook_display() -> Any:
    """Return IPython's ``display`` in a notebook, else None."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is None or not hasattr(shell, "kernel"):
        return None
    return import_module("IPython.display").display


def make_progress(setting: int | None) -> Progress:
    """Return a bar in a notebook or on a terminal with rich installed, else plain lines; nothing for 0, lines for 2."""
    if setting is not None and not setting:
        return Progress()
    if setting == 2:
        return Lines()
    display = notebook_display()
    if display is not None:
        return NotebookBar(display)
    if sys.stderr.isatty():
        try:
            return Bar()
        except ImportError:
            return Lines()
    return Lines()
