"""A watchdog for each process: it ends a process that waits too long, and names the process that it waits for.

A collective cannot be interrupted, and does not know which process is missing. A thread of each process therefore
writes a sign of life to the store of the rendezvous. When a step takes longer than the timeout, the process that gave
none, or that is not in a step, is named in the error with which this process ends.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from mithril.base import BackendError, MithrilError
from mithril_parallel.processes import World, named

EXIT_CODE = 75  # of a temporary failure, after which launchers start the program again
SLOWEST = 1.0  # seconds between two signs of life


class Watchdog:
    """Signs of life of this process, the time that it waits for others, and the step at which all stop together."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.interval = min(max(world.timeout / 10, 0.02), SLOWEST)
        self.stop_at: int | None = None  # the number of steps after which all processes stop
        self.steps = 0  # begun
        self._stop_requested = False
        self._stop_key = ""
        self._lock = threading.Lock()  # held while the processes agree where to stop
        self._task = "the start"
        self._waits = False  # for other processes
        self._compiles = False
        self._since = self._last_answer = time.monotonic()
        self._signs = 0
        self._signs_of_others: dict[int, tuple[dict[str, Any], float]] = {}  # last sign of life, and when it was new
        self._reasons: dict[int, str] = {}  # of processes that have left
        self._ended = threading.Event()

    def start(self) -> None:
        self._stop_key = f"stop/{next(self.world.numbers)}"
        if self.world.size > 1:
            for function in (self._keep_contact, self._keep_time):
                threading.Thread(target=function, name="mithril watchdog", daemon=True).start()

    def stop(self) -> None:
        self._ended.set()

    # -- calls of the thread that trains -------------------------------------------------------------------------------
    def begin_step(self) -> None:
        """Count a step; wait while the processes agree on the last one."""
        with self._lock:
            self.steps += 1

    @contextmanager
    def waiting(self, task: str, *, compiles: bool = False, collective: bool = True) -> Iterator[None]:
        """Name the work inside the block, for which all processes are needed; ``compiles`` may take any time.

        Errors of a ``collective`` do not name the process that is missing, and are explained.
        """
        self._task, self._compiles, self._since, self._waits = task, compiles, time.monotonic(), True
        try:
            yield
        except BackendError as error:
            if not collective:
                raise
            raise self.explained(error) from error.__cause__
        finally:
            self._waits, self._since, self._task = False, time.monotonic(), f"the work after {task}"

    def request_stop(self) -> None:
        """Ask all processes to stop after the same step; a handler of signals may call it."""
        self._stop_requested = True

    def explained(self, error: BackendError) -> BackendError:
        """Add the processes that have ended to the error of a collective."""
        if self.world.size == 1:
            return error
        atexit.register(_exit_within, self.world.timeout)  # engines wait for lost processes when they shut down
        self._signs_of_others = {}
        end = time.monotonic() + 3 * self.interval
        while time.monotonic() < end and not self._ended.is_set():
            with suppress(RuntimeError, OSError):
                self._listen()
            time.sleep(self.interval / 2)
        error.with_facts(*self.suspects(2 * self.interval))
        return error

    # -- threads -------------------------------------------------------------------------------------------------------
    def _keep_contact(self) -> None:
        while not self._ended.wait(self.interval):
            try:
                self._send()
                if self._waits and time.monotonic() - self._since > 2 * self.interval:
                    self._listen()
                elif not self._waits:
                    self._signs_of_others = {}
                self._agree_on_stop()
                self._last_answer = time.monotonic()
            except (RuntimeError, OSError, MithrilError):
                continue  # ``_keep_time`` ends the process if this lasts

    def _send(self) -> None:
        self._signs += 1
        age = time.monotonic() - self._since
        sign = {"n": self._signs, "task": self._task, "waits": self._waits, "compiles": self._compiles, "age": age}
        assert self.world.store is not None
        self.world.store.set(f"sign/{self.world.rank}", json.dumps(sign))

    def _listen(self) -> None:
        assert self.world.store is not None
        for k in range(self.world.size):
            text = self.world.store.get(f"sign/{k}") if k != self.world.rank else None
            sign = json.loads(text) if text else {"n": 0, "task": "the start", "waits": False, "age": 0.0}
            if k != self.world.rank and (reason := self.world.reason(k)) is not None:
                self._reasons[k] = reason
            if k != self.world.rank and (
                k not in self._signs_of_others or self._signs_of_others[k][0]["n"] != sign["n"]
            ):
                self._signs_of_others[k] = sign, time.monotonic()

    def _agree_on_stop(self) -> None:
        assert self.world.store is not None
        if self._stop_requested:
            self._stop_requested = False
            self.world.store.set(self._stop_key, "requested")
        if self.stop_at is None and self.world.store.get(self._stop_key) is not None:
            with self._lock:  # a process may have passed its check after the last step: all run one more
                self.stop_at = 1 + max(
                    self.world.gather(f"{self._stop_key}/steps", self.steps, "the agreement on the last step")
                )

    def _keep_time(self) -> None:
        while not self._ended.wait(min(self.interval, self.world.timeout / 10)):
            if not self._waits or time.monotonic() - self._since < self.world.timeout:
                continue
            suspects = self.suspects(self.world.timeout / 2)
            compiling = self._compiles or any(sign.get("compiles") for sign, _ in list(self._signs_of_others.values()))
            if suspects or not compiling:
                self._end(suspects)

    def suspects(self, seconds: float) -> list[str]:
        """Describe the processes that others wait for: without a sign of life for so long, or busy outside of steps.

        It does not read the store, whose process may be the one that is frozen.
        """
        now, texts = time.monotonic(), []
        if self.world.rank and now - self._last_answer > seconds:
            texts.append("process 0, through which the processes exchange messages, does not answer")
        for k, (sign, last_sign) in sorted(self._signs_of_others.items()):
            if k in self._reasons:
                texts.append(f"process {k} ended: {self._reasons[k]}")
            elif now - last_sign > seconds:
                texts.append(
                    f"process {k} has stopped: no sign of life for {now - last_sign:.1f} s; it was in {sign['task']}"
                )
            elif not sign["waits"] and sign["age"] > seconds:
                texts.append(f"process {k} is late: it has been in {sign['task']} for {sign['age']:.1f} s")
        return texts

    def _end(self, suspects: list[str]) -> None:
        error = BackendError(
            f"process {self.world.rank} has waited {self.world.timeout:g} s in {self._task}",
            facts=suspects or [f"{named(range(self.world.size))} wait for each other"],
            hint="resume training from the latest checkpoint; Trainer(timeout=...) sets the time to wait",
        )
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(EXIT_CODE)


def _exit_within(seconds: float) -> None:
    """End the interpreter if the shutdown of an engine takes longer."""
    timer = threading.Timer(seconds, os._exit, (EXIT_CODE,))
    timer.daemon = True
    timer.start()
