"""Runs with faults: a process is killed, frozen or cut off at a random step; training resumes, equal to the bit."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from rank_programs import SECONDS, started

STEPS = 18
TIMEOUT = 3.0  # seconds, of the trainer
HANGS = 30.0  # seconds after which a process counts as hanging
GRACE = 3.0  # seconds for the end of an interpreter, on a machine that computes nothing else
NAMED = re.compile(
    r"process(es)? [01] .*(stopped|ended|did not arrive|not answer|not reachable)|process 0, through which"
    r"|the leader \(usually slice 0 task 0\)"  # JAX ends a process that loses the first one
)
KINDS = ("kill", "freeze", "partition")
FORMATS = ("parts", "dcp", "orbax")  # of the checkpoints
PROGRAM = f"""
    import time, zlib
    class Slow(ml.Callback):
        def step_end(self, trainer, report):
            report["loss"]
            say("step", trainer.steps)
            time.sleep(0.05)
    t = trainer(timeout={TIMEOUT}, callbacks=[ml.Checkpoint(sys.argv[2], every=2, format=sys.argv[3]), Slow()])
    t.fit(loader(), 2, resume="auto")
    arrays = t.engine.to_numpy()
    say("end", t.steps, repr(t.history.steps), [zlib.crc32(arrays[n].tobytes()) for n in sorted(arrays)])
    sys.stderr.flush()
    os._exit(0)
"""


@dataclass(frozen=True)
class Outcome:
    """The result of a run: seconds until the others had ended, their errors, and the results after resuming."""

    seconds: float
    slowness: float  # of the machine: seconds per second of computing
    errors: list[str]
    results: list[str]


def undisturbed(engine: str) -> list[str]:
    """Return the results of a run without a fault."""
    with _folder() as folder:
        return _to_the_end(folder, engine, "parts")


def run(engine: str, kind: str, seed: int, form: str) -> Outcome:
    """Train, disturb one process at a random step, wait until all have ended, and resume to the end."""
    numbers = random.Random(f"{engine} {kind} {seed}")
    victim, step, delay = numbers.randrange(2), numbers.randrange(1, STEPS - 3), numbers.uniform(0, 0.08)
    network: AbstractContextManager[Network | None] = Network.create(seed) if kind == "partition" else nullcontext()
    with _folder() as folder, network as net:
        prefixes = [()] * 2 if net is None else [net.prefix(k) for k in range(2)]
        host = "127.0.0.1" if net is None else net.address(0)
        with started(folder, engine, PROGRAM, str(folder / "run"), form, prefixes=prefixes, host=host) as processes:
            out = processes[0].stdout
            assert out is not None
            while f"step {step}\n" != (line := out.readline()):
                assert line, "ended before the fault: " + "\n".join(_end_of(p) for p in processes)[-9000:]
            time.sleep(delay)
            begin = time.monotonic()
            if net is not None:
                net.cut()
            else:
                processes[victim].send_signal(signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
            waiting = range(2) if net is not None else [1 - victim]
            slowness = _slowness()
            errors = [_end_of(processes[k]) for k in waiting]
            seconds = time.monotonic() - begin
            assert all(processes[k].returncode for k in waiting), errors
        return Outcome(seconds, slowness, errors, _to_the_end(folder, engine, form))


def check(engine: str, kind: str, seed: int, expected: Sequence[str], form: str = "parts") -> float:
    """Raise AssertionError unless nothing is lost or different, and the error came in time with the right name."""
    outcome = run(engine, kind, seed, form)
    assert outcome.results == list(expected), f"{engine} {kind} {seed}: the results differ"
    limit = TIMEOUT + GRACE * outcome.slowness
    assert outcome.seconds < limit, f"{engine} {kind} {seed}: {outcome.seconds:.1f} of {limit:.1f} s\n{outcome.errors}"
    for error in outcome.errors:
        assert NAMED.search(error), f"{engine} {kind} {seed}: {error[-3000:]}"
    return outcome.seconds


def _to_the_end(folder: Path, engine: str, form: str) -> list[str]:
    with started(folder, engine, PROGRAM, str(folder / "run"), form) as processes:
        results = [process.communicate(timeout=SECONDS) for process in processes]
    ends = [line for out, _ in results for line in out.splitlines() if line.startswith("end")]
    assert len(ends) == 2, results
    return ends


def _slowness() -> float:
    """Measure how many seconds a second of computing takes, at least 1: other programs share the cores."""
    start, computed = time.monotonic(), time.thread_time()
    while time.thread_time() - computed < 0.1:
        pass
    return max(1.0, (time.monotonic() - start) / (time.thread_time() - computed))


def _end_of(process: subprocess.Popen[str]) -> str:
    """Return the errors of a process that has to end; one that hangs is aborted, and says where it was."""
    try:
        return process.communicate(timeout=HANGS)[1]
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)
        stacks = process.communicate(timeout=SECONDS)[1]
    raise AssertionError(f"a process hung for {HANGS:g} s:\n{stacks[-6000:]}")


@contextmanager
def _folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="faults-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


class Network:
    """Two network namespaces with a cable between them, which can be cut."""

    def __init__(self, number: int) -> None:
        self.number, self.names = number, [f"mithril{os.getpid()}x{k}" for k in range(2)]

    def address(self, k: int) -> str:
        return f"10.77.{self.number % 250}.{k + 1}"

    def prefix(self, k: int) -> tuple[str, ...]:
        """Return the command that starts a program in a namespace, with its address as the name of the host."""
        script = f'hostname {self.address(k)} && GLOO_SOCKET_IFNAME=cable{k} exec "$@"'
        return ("ip", "netns", "exec", self.names[k], "unshare", "--uts", "sh", "-c", script, "sh")

    def cut(self) -> None:
        _ip("-n", self.names[1], "link", "set", "cable1", "down")

    @classmethod
    @contextmanager
    def create(cls, number: int) -> Iterator[Network]:
        net = cls(number)
        try:
            for name in net.names:
                _ip("netns", "add", name)
                _ip("-n", name, "link", "set", "lo", "up")
            _ip("link", "add", "cable0", "netns", net.names[0], "type", "veth", "peer", "cable1", "netns", net.names[1])
            for k, name in enumerate(net.names):
                _ip("-n", name, "address", "add", f"{net.address(k)}/24", "dev", f"cable{k}")
                _ip("-n", name, "link", "set", f"cable{k}", "up")
            yield net
        finally:
            for name in net.names:
                subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def can_cut_networks() -> bool:
    """Whether this user may create network namespaces."""
    if shutil.which("ip") is None or os.getuid():
        return False
    try:
        with Network.create(251):
            return True
    except subprocess.CalledProcessError:
        return False


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], capture_output=True, check=True)
