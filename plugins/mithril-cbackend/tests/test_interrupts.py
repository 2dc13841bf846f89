"""Ctrl-C is answered while a long program runs in machine code, and the next call is right."""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy as np
import pytest

import mithril as ml
from mithril.models import Linear, Model

SECONDS = 2.0


class Slow:
    """The machine code, after a wait that represents a long program."""

    def __init__(self, run):
        self.run, self.waits, self.release_gil = run, True, True

    def __call__(self, address):
        if self.waits:
            time.sleep(SECONDS)
        return self.run(address)


@pytest.fixture
def program():
    compiled = ml.compile(Model(Linear(4)), "c", shapes={"input": [2, 3]})
    compiled.bind(compiled.randomize_params(seed=0))
    executable = compiled.programs[-1].executable
    executable.run = Slow(executable.run)
    return compiled, executable


@pytest.fixture
def _python_handles_interrupts():
    """Install the handler of Python, which a process in the background starts without."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_python_handles_interrupts")
@pytest.mark.parametrize("is_first", [True, False])
def test_an_interrupt_does_not_wait_for_the_program(program, is_first):
    compiled, executable = program
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    executable.run.waits = not is_first
    expected = x @ compiled.params["linear.weight"].T + compiled.params["linear.bias"]
    if not is_first:
        executable.interruptible, executable.short = True, False  # as measured in a long first run
    executable.run.waits = True
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    start = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        compiled({"input": x + 1})
    assert time.perf_counter() - start < SECONDS - 0.5
    executable.run.waits = False
    results = [compiled({"input": x + k})["output"] for k in range(3)]  # waits for the program that still runs
    assert time.perf_counter() - start > SECONDS - 0.5
    np.testing.assert_allclose(results[0], expected, rtol=1e-5)


def test_errors_of_the_machine_code_are_raised(program):
    compiled, executable = program
    failing = pytest.MonkeyPatch()
    with failing.context() as patch:
        patch.setattr(executable.run, "run", lambda address: 1 / 0)
        patch.setattr(executable.run, "waits", False)
        with pytest.raises(ZeroDivisionError):
            compiled({"input": np.ones((2, 3), np.float32)})
    executable.run.waits = False
    assert compiled({"input": np.ones((2, 3), np.float32)})["output"].shape == (2, 4)
