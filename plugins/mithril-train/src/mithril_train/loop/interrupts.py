"""Ctrl-C during training: it waits while values that belong together change."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Interrupts:
    """The handling of SIGINT by a trainer: an interrupt inside ``held`` is raised at the end of the block.

    A step overwrites its arrays in place, so that no array of the step before exists once it runs. Arrays, counters,
    the position in the data and the totals of the epoch therefore change inside one such block. A second interrupt does
    not wait: a step on lost devices may never end.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._waiting = False
        self._previous: Callable[..., Any] = signal.default_int_handler

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Handle interrupts inside the block; Python delivers them to the main thread."""
        current = signal.getsignal(signal.SIGINT)
        is_handled = current == self._handle  # by an outer block, or one whose end was interrupted
        if is_handled or threading.current_thread() is not threading.main_thread() or not callable(current):
            yield
            return
        self._previous = current
        signal.signal(signal.SIGINT, self._handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, current)

    def _handle(self, number: int, frame: Any) -> None:
        waits = self._depth > 0 and not self._waiting
        self._waiting = waits
        if not waits:
            self._previous(number, frame)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Let interrupts wait until the end of the block."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._waiting and self._depth == 0:
                self._waiting = False
                self._previous(signal.SIGINT, None)
