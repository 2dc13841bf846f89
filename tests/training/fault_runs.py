"""Runs with faults: training by several processes is disturbed and resumes, with as many processes or others.

No sample of an epoch may be lost or seen twice, and the results equal those of an undisturbed run: to the bit with the
same number of processes.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from rank_programs import SECONDS, environment_of, started, written

ROWS, STEPS = 99, 18  # of two epochs
TIMEOUT = 6.0  # seconds, of the trainer
PATIENT = 60.0  # of the trainer that waits for a slow process
HANGS = 90.0  # seconds after which a process counts as hanging
GRACE = 3.0  # seconds for the end of an interpreter, on a machine that computes nothing else
NAMED = re.compile(
    r"process(es)? [01] .*(stopped|ended|did not arrive|not answer|not reachable)|process 0, through which"
    r"|the leader \(usually slice 0 task 0\)"  # JAX ends a process that loses the first one
    r"|JAX distributed service detected fatal errors"  # and others, if a busy machine delays the watchdog
)
KINDS = ("kill", "freeze", "terminate", "terminate one", "slow", "full disk", "corrupt", "partition")
SURVIVED = ("slow", "full disk")  # without a restart
FORMATS = ("parts", "dcp", "orbax")  # of the checkpoints
LAUNCHERS = ("torch", "jax", "torchrun")  # the last one starts its processes again by itself
PROGRAM = """
    import json, time
    class Told(ml.Callback):
        def batch_begin(self, trainer, batch):
            rows = trainer.to_numpy(batch["x"])[:, 0].tolist()
            if rank == 0:
                say("batch", json.dumps([trainer.steps, [X[:, 0].tolist().index(x) for x in rows]]))
        def step_end(self, trainer, report):
            report["loss"]
            if rank == 0:
                say("step", trainer.steps)
            time.sleep(0.05)
    say("process", rank, os.getpid())
    saved = ml.Checkpoint(sys.argv[2], every=2, format=sys.argv[3])
    on = ml.NumpyBackend() if engine == "numpy" else None
    t = trainer(on, timeout=float(sys.argv[4]), callbacks=[saved, Told()])
    part = {"rank": rank, "world": size} if size > 1 else {}
    t.fit(loader(**part), 2, resume="auto")
    arrays = {n: x.tolist() for n, x in sorted(t.engine.to_numpy().items())}
    if rank == 0:
        say("end", json.dumps([t.steps, t.history.steps, arrays]))
    sys.stderr.flush()
    os._exit(0)
"""


@cache
def undisturbed(engine: str, size: int = 2) -> list[Any]:
    """Return the number of steps, the loss of each, and the arrays of a run without a fault."""
    with _folder() as folder, Job.start(folder, engine, size) as job:
        job.end()
        return job.results()


def check(
    launcher: str, kinds: Sequence[str], seed: int = 1, form: str = "parts", then: int = 2, exact: bool = True
) -> float:
    """Disturb two processes by faults at random steps, resume with ``then`` processes, and compare the results.

    Return the seconds in which the other processes have ended. Without ``exact`` the results are compared with those of
    NumPy, which are faster to compute. Errors are AssertionErrors.
    """
    numbers = random.Random(f"{launcher} {kinds} {seed} {then}")
    ending = "terminate" if kinds[-1] in SURVIVED and then != 2 else "kill" if kinds[-1] == "corrupt" else None
    kinds = kinds if ending is None else (*kinds, ending)
    steps = sorted(numbers.sample(range(3, STEPS - 4), len(kinds)))
    text = f"{launcher} {' '.join(kinds)} {seed} {form} {then}"
    network: AbstractContextManager[Network | None] = Network.create(seed) if "partition" in kinds else nullcontext()
    with _folder() as folder, network as net:
        restarts = int(launcher == "torchrun" and then == 2)
        timeout = PATIENT if "slow" in kinds else TIMEOUT
        with Job.start(folder, launcher, 2, form, timeout, net, restarts) as job:
            for kind, step in zip(kinds, steps, strict=True):
                job.wait_for(step)
                time.sleep(numbers.uniform(0, 0.08))
                job.inflict(kind, numbers.randrange(2))
            if kinds[-1] in SURVIVED or restarts:
                job.end()
                seconds = 0.0
            else:
                seconds = job.fail(text, kinds[-1], timeout)
            lines = job.lines
        if not job.has_ended():
            with Job.start(folder, "torch" if launcher == "torchrun" else launcher, then, form, PATIENT) as job:
                job.end()
                lines += job.lines
    expect_once(lines, text)
    engine = "torch" if launcher == "torchrun" else launcher
    expect_equal(job.results(), undisturbed(engine) if exact else undisturbed("numpy", 1), then == 2 and exact, text)
    return seconds


def expect_once(lines: Sequence[str], text: str) -> None:
    """Expect every sample once in each epoch; of a step that ran again only the last run counts."""
    batches = dict(json.loads(line.removeprefix("batch ")) for line in lines if line.startswith("batch "))
    assert sorted(batches) == list(range(STEPS)), f"{text}: steps {sorted(batches)}"
    for epoch in range(2):
        steps = range(epoch * STEPS // 2, (epoch + 1) * STEPS // 2)
        counts = Counter(sample for step in steps for sample in batches[step])
        assert counts == Counter(range(ROWS)), f"{text}: samples of epoch {epoch}: {counts}"


def expect_equal(results: list[Any], expected: list[Any], exact: bool, text: str) -> None:
    assert results[0] == expected[0] == STEPS, text
    if exact:
        assert results == expected, f"{text}: the results differ"
    np.testing.assert_allclose(results[1], expected[1], rtol=1e-4, err_msg=text)
    for name, values in expected[2].items():
        np.testing.assert_allclose(results[2][name], values, rtol=1e-3, atol=1e-5, err_msg=f"{text} {name}")


class Job:
    """The processes of one start of the program."""

    def __init__(self, folder: Path, processes: list[subprocess.Popen[str]], size: int, net: Network | None) -> None:
        self.folder, self.processes, self.size, self.net = folder, processes, size, net
        self.lines: list[str] = []  # of process 0; of all processes with torchrun

    @classmethod
    @contextmanager
    def start(
        cls,
        folder: Path,
        launcher: str,
        size: int,
        form: str = "parts",
        timeout: float = PATIENT,
        net: Network | None = None,
        restarts: int = 0,
    ) -> Iterator[Job]:
        arguments = (str(folder / "run"), form, str(timeout))
        if launcher != "torchrun":
            prefixes = [()] * size if net is None else [net.prefix(k) for k in range(size)]
            host = "127.0.0.1" if net is None else net.address(0)
            with started(folder, launcher, PROGRAM, *arguments, size=size, prefixes=prefixes, host=host) as processes:
                yield cls(folder, processes, size, net)
            return
        options = ["--standalone", "--nproc-per-node", str(size), "--max-restarts", str(restarts)]
        command = [sys.executable, "-m", "torch.distributed.run", *options, str(written(folder, PROGRAM)), "torch"]
        agent = subprocess.Popen(
            [*command, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment_of({}),
        )
        job = cls(folder, [agent], size, net)
        try:
            yield job
        finally:
            agent.kill()
            for pid in job.pids():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            agent.communicate()

    # -- what the processes tell --------------------------------------------------------------------------------------
    def pids(self) -> list[int]:
        """Return the processes that have started, the first ones first."""
        numbers = dict(line.split()[1:] for line in self.lines if line.startswith("process "))
        return (
            [int(numbers[key]) for key in sorted(numbers)]
            if len(self.processes) == 1
            else [p.pid for p in self.processes]
        )

    def wait_for(self, step: int) -> None:
        out = self.processes[0].stdout
        assert out is not None
        while f"step {step}" not in self.lines:
            line = out.readline()
            assert line, "ended before the fault: " + "\n".join(_end_of(p)[1] for p in self.processes)[-9000:]
            self.lines.append(line.rstrip("\n"))

    def has_ended(self) -> bool:
        return any(line.startswith("end ") for line in self.lines)

    def results(self) -> list[Any]:
        (text,) = (line for line in self.lines if line.startswith("end "))
        results: list[Any] = json.loads(text.removeprefix("end "))
        return results

    def end(self) -> None:
        """Wait until training has ended without an error."""
        outputs = [process.communicate(timeout=SECONDS) for process in self.processes]
        self.lines += outputs[0][0].splitlines()
        errors = "\n".join(err[-6000:] for _, err in outputs)
        assert self.has_ended() and not any(process.returncode for process in self.processes), errors

    def fail(self, text: str, kind: str, timeout: float) -> float:
        """Wait until all have ended after a fault, and check how; return the seconds that it took."""
        begin, slowness = time.monotonic(), _slowness()
        frozen = [self.victim] if kind == "freeze" and len(self.processes) > 1 else []
        waiting = [process for k, process in enumerate(self.processes) if k not in frozen]
        outputs = [_end_of(process) for process in waiting]
        seconds = time.monotonic() - begin
        for k in frozen:
            self.processes[k].kill()
        self.lines += (
            outputs[0][0] if waiting[0] is self.processes[0] else self.processes[0].communicate()[0]
        ).splitlines()
        errors = [err for _, err in outputs]
        codes = [process.returncode for process in waiting]
        if "terminate" in kind and f"step {STEPS}" in self.lines:  # training was complete before all had agreed to end
            assert set(codes) in ({0}, {-signal.SIGTERM}), f"{text}: {codes} {errors}"
            return seconds
        assert all(codes), f"{text}: {codes} {errors}"
        if len(self.processes) == 1:
            return seconds  # the launcher has its own time and text
        if "terminate" in kind:
            assert codes == [-signal.SIGTERM] * 2, f"{text}: {codes} {errors}"
            saved = max(path.parent.name for path in (self.folder / "run").glob("step-*/commit.json"))
            last = [line for line in self.lines if line.startswith("step ")][-1]
            assert int(saved.removeprefix("step-")) == int(last.removeprefix("step ")), text
            return seconds
        limit = timeout + GRACE * slowness
        assert seconds < limit, f"{text}: {seconds:.1f} of {limit:.1f} s\n{errors}"
        messages = [err for k, err in enumerate(errors) if waiting[k] is not self.processes[self.victim] or self.net]
        assert all(NAMED.search(err) for err in messages), f"{text}: {[err[-3000:] for err in messages]}"
        return seconds

    # -- faults -------------------------------------------------------------------------------------------------------
    def inflict(self, kind: str, victim: int) -> None:
        self.victim = victim
        pids = self.pids()
        if kind == "partition":
            assert self.net is not None
            self.net.cut()
        elif "terminate" in kind:
            for pid in pids if kind == "terminate" else pids[victim : victim + 1]:
                os.kill(pid, signal.SIGTERM)
        elif kind == "slow":
            os.kill(pids[victim], signal.SIGSTOP)
            time.sleep(TIMEOUT / 2)
            os.kill(pids[victim], signal.SIGCONT)
        elif kind == "full disk":
            self._fill_disk(pids[victim])
        elif kind == "freeze":
            os.kill(pids[victim], signal.SIGSTOP)
        elif kind == "corrupt":
            flip_bytes(self.folder / "run")
        else:
            os.kill(pids[victim], signal.SIGKILL)

    def _fill_disk(self, pid: int) -> None:
        """Let a process write no file for some steps, as on a full disk."""
        import resource

        limits = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, limits[1]))
        self.wait_for(max(int(line.split()[1]) for line in self.lines if line.startswith("step ")) + 3)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)


def flip_bytes(folder: Path) -> None:
    """Damage the largest file of the latest complete checkpoint."""
    while True:
        latest = max(path.parent for path in folder.glob("step-*/commit.json"))
        files = [path for path in latest.rglob("*") if path.is_file() and path.name != "commit.json"]
        try:
            with max(files, key=lambda path: path.stat().st_size).open("r+b") as file:
                middle = file.seek(0, os.SEEK_END) // 2
                file.seek(middle)
                flipped = bytes(255 - byte for byte in file.read(8))
                file.seek(middle)
                file.write(flipped)
            return
        except (FileNotFoundError, ValueError):  # removed, because a later one is complete
            continue


def _slowness() -> float:
    """Measure how many seconds a second of computing takes, at least 1: other programs share the cores."""
    start, computed = time.monotonic(), time.thread_time()
    while time.thread_time() - computed < 0.1:
        pass
    return max(1.0, (time.monotonic() - start) / (time.thread_time() - computed))


def _end_of(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Return the outputs of a process that has to end; one that hangs is aborted, and says where it was."""
    try:
        return process.communicate(timeout=HANGS)
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
