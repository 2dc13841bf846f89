"""The place of this process among the tasks of a launcher: torchrun, Slurm, Open MPI or Kubernetes."""

from __future__ import annotations

import json
import os
import re
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from mithril.graph import BackendError

FIRST_PORT, PORTS = 15000, 20000  # of a rendezvous; the job's number selects one, so that jobs use different ports


@dataclass(frozen=True, slots=True)
class LaunchedTask:
    """The rank of this process, the number of processes, and the address of the first one if the launcher tells it."""

    launcher: str
    rank: int
    size: int
    local_rank: int
    host: str | None = None
    port: int | None = None

    def torch_environment(self) -> dict[str, str]:
        """Return the variables of ``torchrun``, from which ``torch.distributed`` starts; raise without an address."""
        if self.host is None or self.port is None:
            raise BackendError(
                f"{self.launcher} started {self.size} processes, but does not say where the first one is",
                hint="set MASTER_ADDR and MASTER_PORT to the host of the first process and a free port",
            )
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(self.local_rank),
            "MASTER_ADDR": self.host,
            "MASTER_PORT": str(self.port),
        }


def launched_task(environment: Mapping[str, str] | None = None) -> LaunchedTask | None:
    """Return the task of this process, or None if no launcher started several.

    The variables of torchrun, which Ray Train sets too, come first: a user can set them under any launcher.
    """
    variables = os.environ if environment is None else environment
    for read in (_torchrun, _slurm, _open_mpi, _kubernetes):
        task = read(variables)
        if task is not None:
            return task
    return None


def shared_attempt(
    rank: int, size: int, write: Callable[[str, str], None], read: Callable[[str], str | None], seconds: float
) -> str:
    """Return a text that the processes of this attempt of a job share, and that no other attempt has.

    The store behind ``write`` and ``read`` may survive a restart, as that of torchrun's agent does, and the number of
    restarts differs between agents. Process 0 therefore selects a new text; the others accept one only with an answer
    that contains the token that they have just drawn.
    """
    token, end = uuid.uuid4().hex, time.monotonic() + seconds
    if rank == 0:
        write("attempt", token)
        tokens = [token, *(_awaited(partial(read, f"{token}/{k}"), end, k, rank, size) for k in range(1, size))]
        write(f"{token}/all", json.dumps(tokens))
        return token
    requested = None

    def answered() -> str | None:
        nonlocal requested
        attempt = read("attempt")
        if attempt is None:
            return None
        if attempt != requested:
            write(f"{attempt}/{rank}", token)
            requested = attempt
        answer = read(f"{attempt}/all")
        return attempt if answer is not None and json.loads(answer)[rank] == token else None

    return _awaited(answered, end, 0, rank, size)


def _awaited(look: Callable[[], str | None], end: float, source: int, rank: int, size: int) -> str:
    """Return the first text of ``look``; raise BackendError if process ``source`` has not written it in time."""
    pause = 0.001
    while (text := look()) is None:
        if time.monotonic() >= end:
            raise BackendError(
                f"process {source} did not arrive at: the start of the job",
                facts=[f"this is process {rank} of {size}"],
                hint=f"read the output of process {source} and of the launcher",
            )
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    return text


def _torchrun(variables: Mapping[str, str]) -> LaunchedTask | None:
    if "RANK" not in variables or "WORLD_SIZE" not in variables:
        return None
    rank = _number(variables, "RANK")
    local = _number(variables, "LOCAL_RANK") if "LOCAL_RANK" in variables else rank
    return LaunchedTask("torchrun", rank, _number(variables, "WORLD_SIZE"), local, *_master(variables))


def _slurm(variables: Mapping[str, str]) -> LaunchedTask | None:
    count = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in variables else "SLURM_NTASKS"
    if "SLURM_PROCID" not in variables or _number(variables, count, 1) < 2:
        return None  # without srun there is one process, however many tasks the job may start
    host, port = _master(variables)
    nodes = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST")
    if host is None and nodes:
        host = first_host(nodes)
    if port is None:
        port = FIRST_PORT + _number(variables, "SLURM_JOB_ID", 0) % PORTS
    rank, local = _number(variables, "SLURM_PROCID"), _number(variables, "SLURM_LOCALID", 0)
    return LaunchedTask("Slurm", rank, _number(variables, count), local, host, port)


def _open_mpi(variables: Mapping[str, str]) -> LaunchedTask | None:
    size = _number(variables, "OMPI_COMM_WORLD_SIZE", 1)
    if size < 2:
        return None
    host, port = _master(variables)
    if host is None and _number(variables, "OMPI_COMM_WORLD_LOCAL_SIZE", 0) == size:
        host = "127.0.0.1"
    if host is not None and port is None:
        port = FIRST_PORT + sum(map(ord, variables.get("PMIX_NAMESPACE", ""))) % PORTS
    rank = _number(variables, "OMPI_COMM_WORLD_RANK")
    return LaunchedTask("Open MPI", rank, size, _number(variables, "OMPI_COMM_WORLD_LOCAL_RANK", 0), host, port)


def _kubernetes(variables: Mapping[str, str]) -> LaunchedTask | None:
    """Return the task of an indexed job; its manifest says by WORLD_SIZE that the pods belong together."""
    if "JOB_COMPLETION_INDEX" not in variables or _number(variables, "WORLD_SIZE", 1) < 2:
        return None
    rank = _number(variables, "JOB_COMPLETION_INDEX")
    return LaunchedTask("Kubernetes", rank, _number(variables, "WORLD_SIZE"), 0, *_master(variables))


def _master(variables: Mapping[str, str]) -> tuple[str | None, int | None]:
    port = _number(variables, "MASTER_PORT") if "MASTER_PORT" in variables else None
    return variables.get("MASTER_ADDR"), port


def _number(variables: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = variables.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdecimal():
        state = "is missing" if text is None else f"is '{text}'"
        raise BackendError(f"the environment variable {name} {state}, expected a number", hint=f"export {name}=0")
    return int(text)


def first_host(nodes: str) -> str:
    """Return the first host of Slurm's list of nodes: ``gpu[03-07,9],login1`` starts with ``gpu03``."""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\])?([^,\[]*)", nodes)
    if match is None:
        raise BackendError(
            f"the list of nodes '{nodes}' has no first host", hint="set MASTER_ADDR to the host of the first process"
        )
    return match[1] + (match[2] or "") + (match[3] or "")
