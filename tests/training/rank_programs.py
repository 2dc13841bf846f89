"""Programs of several processes for the tests: PyTorch with gloo, or JAX with one CPU device per process."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

SECONDS = 600
PRELUDE = """
import os, sys
engine, rank, size = sys.argv[1], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if engine == "jax":
    import jax
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    jax.distributed.initialize(address, size, rank, heartbeat_timeout_seconds=10)
elif engine == "torch":
    import torch
    torch.set_num_threads(1)
import numpy as np
import mithril as ml
from mithril.models import IOKey, Linear, Model, Relu

numbers = np.random.default_rng(0)
X = numbers.standard_normal((99, 6), dtype=np.float32)
Y = X[:, :1] * X[:, 1:2]

def backend():
    kind = ml.JaxBackend if engine == "jax" else ml.TorchBackend
    return kind(device="cpu", device_mesh=(size,))

def model():
    return Model.create(outputs={"y": Linear(1, name="b")(Relu()(Linear(8, name="a")(IOKey("x"))))})

def trainer(on=None, timeout=120.0, **options):
    choice = {} if on else {"parallelism": "fsdp"}
    return ml.Trainer(
        model(), ml.Adam(0.01), loss="mse_loss", backend=on or backend(), progress=False, timeout=timeout,
        **choice, **options,
    )

def loader(batch_size=12, **options):
    return ml.DataLoader({"x": X, "target": Y}, batch_size, shuffle=True, seed=3, **options)

def say(*words):
    print(*words, flush=True)
"""


@cache
def can_unshare() -> bool:
    """Whether this user may start processes with a numbering of their own, as containers do."""
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*UNSHARE, "true"], capture_output=True, check=False).returncode == 0


UNSHARE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def written(folder: Path, text: str) -> Path:
    """Write a program and return its file."""
    file = folder / "program.py"
    file.write_text(PRELUDE + textwrap.dedent(text))
    return file


def environment_of(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process of a program."""
    few = {"OMP_NUM_THREADS": "1", "NPROC": "4", "JAX_PLATFORMS": "cpu", "PYTHONFAULTHANDLER": "1"}
    environment = {**os.environ, **few, **variables}
    environment.pop("JAX_NUM_CPU_DEVICES", None)
    return environment


@contextlib.contextmanager
def started(
    folder: Path,
    engine: str,
    text: str,
    *arguments: str,
    size: int = 2,
    prefix: Sequence[str] = (),
    prefixes: Sequence[Sequence[str]] = (),
    host: str = "127.0.0.1",
) -> Iterator[list[subprocess.Popen[str]]]:
    """Start the processes of a program; end them with the block."""
    file = written(folder, text)
    shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": host, "MASTER_PORT": str(free_port())}
    processes = []
    try:
        for rank in range(size):
            environment = environment_of({**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            command = [*(prefixes[rank] if prefixes else prefix), sys.executable, str(file), engine, *arguments]
            pipe = subprocess.PIPE
            processes.append(subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment))
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def outputs(folder: Path, engine: str, text: str, *arguments: str, **options: object) -> list[str]:
    """Run a program to its end; return the output of each process."""
    with started(folder, engine, text, *arguments, **options) as processes:  # type: ignore[arg-type]
        results = [process.communicate(timeout=SECONDS) for process in processes]
        codes = [process.returncode for process in processes]
    assert not any(codes), "\n".join(f"process {k}: {err[-3000:]}" for k, (_, err) in enumerate(results))
    return [out for out, _ in results]
