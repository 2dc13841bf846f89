"""A watchdog for each process: it ends a process that waits too long, and names the process that it waits for.

A collective cannot be interrupted, and does not know which process is missing. A thread of each process therefore
writes a sign of life to the store of the rendezvous. When a step takes longer than the timeout, the process that gave
none, or that is not in a step, is named in the error with which this process ends.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

from mithril.graph import BackendError, MithrilError
from mithril_parallel.processes import World, named
from mithril_parallel.sharding.storage import SaveError

EXIT_CODE = 75  # of a temporary failure, after which launchers start the program again
SLOWEST = 1.0  # seconds between two signs of life
ENDING = 1 / 3  # of the timeout, in which a process ends after an error
PATIENCE = 2.0  # seconds in addition to the timeout in which an exchange, which has its own, names who is missing


class Watchdog:
    """Signs of life of this process, the time that it waits for others, and the step at which all stop together."""

    def __init__(self, world: World) -> None:
        self.world = world
        # Ten signs within the timeout, so that a lost or late one does not look like a frozen process.
        self.interval = min(max(world.timeout / 10, 0.02), SLOWEST)
        self.stop_at: int | None = None  # the number of steps after which all processes stop
        self.steps = 0  # begun
        self._stop_requested = False
        self._stop_key = ""
        self._lock = threading.Lock()  # held while the processes agree where to stop
        self._task = "the start"
        self._waits = False  # for other processes
        self._compiles = False
        self._exchanges = False
        self._failure: BackendError | None = None
        self._deadline = math.inf  # of the waits after a failure
        self._since = self._last_answer = time.monotonic()
        self._signs = 0
        self._signs_of_others: dict[int, tuple[dict[str, Any], float]] = {}  # last sign of life, and when it was new
        self._reasons: dict[int, str] = {}  # of processes that have left
        self._ended = threading.Event()

    def start(self) -> None:
        self._stop_key = f"stop/{next(self.world.numbers)}"
        if self.world.size > 1:
            self.world.waiting = self._exchanging
            for function in (self._keep_contact, self._keep_time):
                threading.Thread(target=function, name="mithril watchdog", daemon=True).start()

    def stop(self) -> None:
        self._ended.set()
        self.world.waiting = nullcontext

    # -- calls of the thread that trains -------------------------------------------------------------------------------
    def begin_step(self) -> None:
        """Count a step; wait while the processes agree on the last one."""
        with self._lock:
            self.steps += 1

    @contextmanager
    def waiting(self, task: str, *, compiles: bool = False, collective: bool = True) -> Iterator[None]:
        """Name the work inside the block, for which all processes are needed; ``compiles`` may take any time.

        Errors of a ``collective`` do not name the process that is missing, and are explained. Blocks may be nested:
        after an inner one the outer one still waits.
        """
        outer = self._task, self._compiles, self._exchanges, self._waits
        self._task, self._compiles, self._exchanges = task, compiles, False
        self._since, self._waits = time.monotonic(), True
        try:
            yield
        except SaveError:
            raise  # of all processes: training may continue
        except BackendError as error:
            if self._failure is None:
                self.failed(error)
                if collective:
                    self._explain(error)
            raise
        finally:
            self._since = time.monotonic()
            self._task, self._compiles, self._exchanges, self._waits = outer
            if not self._waits:
                self._task = f"the work after {task}"

    @contextmanager
    def _exchanging(self, purpose: str) -> Iterator[None]:
        """Watch an exchange of the world: it ends by itself, unless the process of the store is frozen."""
        with self.waiting(purpose, collective=False):
            self._exchanges = True
            yield

    def request_stop(self) -> None:
        """Ask all processes to stop after the same step; a handler of signals may call it."""
        self._stop_requested = True

    def failed(self, error: BaseException) -> None:
        """Bound the time to the end of this process: engines and saves would wait for the lost processes again."""
        if self.world.size > 1 and self._failure is None:
            atexit.register(_exit_within, self.world.timeout * ENDING)
            if isinstance(error, BackendError):
                self._failure, self._deadline = error, time.monotonic() + self.world.timeout * ENDING

    def _explain(self, error: BackendError) -> None:
        """Add the processes that have ended to the error of a collective."""
        if self.world.size == 1:
            return
        self._signs_of_others = {}
        # Three intervals, so that each process that lives gives a sign at least once.
        end = time.monotonic() + 3 * self.interval
        while time.monotonic() < end and not self._ended.is_set():
            with suppress(RuntimeError, OSError):
                self._listen()
            time.sleep(self.interval / 2)
        error.with_facts(*self.suspects(2 * self.interval))

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
            # A process may have passed its check after the last step: all run one more.
            with self._lock:
                self.stop_at = 1 + max(
                    self.world.gather(f"{self._stop_key}/steps", self.steps, "the agreement on the last step")
                )

    def _keep_time(self) -> None:
        period = min(self.interval, self.world.timeout / 10)
        before = time.monotonic()
        while not self._ended.wait(period):
            now = time.monotonic()
            # The others were not silent, this process stood still.
            if now - before > self.world.timeout / 4:
                self._forgive(now - before)
            elif self._is_overdue():
                self._end(self.suspects(self.world.timeout / 2))
            before = now

    def _forgive(self, seconds: float) -> None:
        self._since += seconds
        self._last_answer += seconds
        for k, (sign, last_sign) in list(self._signs_of_others.items()):
            self._signs_of_others[k] = sign, last_sign + seconds

    def _is_overdue(self) -> bool:
        """Whether this process has waited too long. While one compiles, others end only if one of them is silent."""
        timeout, waited = self.world.timeout, time.monotonic() - self._since
        if self._waits and time.monotonic() > self._deadline:
            return True
        if not self._waits or waited < timeout:
            return False
        if self._exchanges and waited < timeout + PATIENCE and not self._store_is_silent(timeout / 2):
            return False
        compiling = self._compiles or any(sign.get("compiles") for sign, _ in list(self._signs_of_others.values()))
        return not compiling or bool(self.suspects(timeout))

    def _store_is_silent(self, seconds: float) -> bool:
        return self.world.rank > 0 and time.monotonic() - self._last_answer > seconds

    def suspects(self, seconds: float) -> list[str]:
        """Describe the processes that others wait for: without a sign of life for so long, or busy outside of steps.

        It does not read the store, whose process may be the one that is frozen.
        """
        now, texts = time.monotonic(), []
        if self._store_is_silent(seconds):
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
        error = self._failure
        if error is not None:
            error.with_facts(*(text for text in suspects if text not in str(error)))
        else:
            error = BackendError(
                f"process {self.world.rank} has waited {self.world.timeout:g} s in {self._task}",
                facts=suspects or [f"{named(range(self.world.size))} wait for each other"],
                hint="resume training from the latest checkpoint; Trainer(timeout=...) sets the time to wait",
            )
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        # No exception reaches a thread that waits in a collective, and exit handlers of the engine
        # would wait for it.
        os._exit(EXIT_CODE)


def _exit_within(seconds: float) -> None:
    """End the interpreter if the shutdown of an engine takes longer."""
    timer = threading.Timer(seconds, os._exit, (EXIT_CODE,))
    timer.daemon = True
    timer.start()
