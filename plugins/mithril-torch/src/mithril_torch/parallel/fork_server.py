"""Worker processes of a pool: a clean interpreter imports PyTorch once and forks.

``python -m mithril_torch.parallel.fork_server <control> <folder> <device> <socket> ...``: the numbers are inherited
socket descriptors. A worker exits when its socket closes; all are killed when the control socket closes.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from mithril_torch.parallel.shared_memory import Block
from mithril_torch.parallel.worker import Spec, WorkerProgram


def main() -> None:
    control, folder, device, *sockets = sys.argv[1:]
    numbers = [int(s) for s in sockets]
    children = []
    for rank, number in enumerate(numbers):
        child = os.fork()
        if child == 0:
            os.close(int(control))
            for other in numbers:
                if other != number:
                    os.close(other)
            _serve(Connection(number), rank, len(numbers), folder, device)
            os._exit(0)
        children.append(child)
    for number in numbers:
        os.close(number)
    watch = socket.socket(fileno=int(control))
    watch.recv(1)  # nothing is ever sent: this returns when the owner closes the socket or exits
    for child in children:
        os.kill(child, signal.SIGKILL)
    for child in children:
        os.waitpid(child, 0)
    shutil.rmtree(folder, ignore_errors=True)


def _serve(connection: Connection, rank: int, world: int, folder: str, device: str) -> None:
    """Handle requests until the connection closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the owner handles it, and closes the connection when it exits
    try:
        local_device = torch.device(device, rank) if device == "cuda" else torch.device(device)
        if device == "cuda":
            torch.cuda.set_device(local_device)
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
        os.environ["LOCAL_RANK"] = str(rank)
        dist.init_process_group(
            "nccl" if device == "cuda" else "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world
        )
        programs: dict[int, _Loaded] = {}
        connection.send(("ready", None))
        while True:
            try:
                word, *rest = connection.recv()
            except (EOFError, OSError):
                return
            try:
                _answer(word, rest, programs, local_device)
                connection.send(("done", None))
            except BaseException:
                connection.send(("failed", traceback.format_exc()))
    except BaseException:
        connection.send(("failed", traceback.format_exc()))


def _answer(word: str, rest: list[Any], programs: dict[int, _Loaded], device: torch.device) -> None:
    if word == "load":
        number, spec, path = rest
        programs[number] = _Loaded(spec, path, device)
    elif word == "run":
        number, shared, reused = rest
        programs[number].run(shared, reused)
    elif word == "forget":
        programs.pop(rest[0], None)


class _Loaded:
    """A program and the shared memory of its arguments and results."""

    def __init__(self, spec: Spec, path: str, device: torch.device) -> None:
        if spec.threads is not None:
            torch.set_num_threads(spec.threads)
        self.program = WorkerProgram(spec, device)
        self.block = Block.open(path, spec)
        self.arguments: dict[str, torch.Tensor] = {}
        self.results: dict[str, torch.Tensor] = {}  # possible arguments of the next call

    def run(self, shared: list[str], reused: list[str]) -> None:
        """Run the program; ``shared`` arguments are in shared memory, ``reused`` are results of the last call."""
        self.arguments.update({name: self.results[name] for name in reused if name in self.program.needs})
        for name in shared:
            if name in self.program.needs:
                self.arguments[name] = self.program.local_shard(name, self.block.arrays[name]).to(
                    self.program.device, copy=True
                )
        results = self.program(self.arguments)
        self.results = {name: x for name, x in results.items() if self.program.spec.carries(name)}
        for name, x in results.items():
            self._write(name, x)

    def _write(self, name: str, x: torch.Tensor) -> None:
        """Write this worker's shard of a result; only the first worker writes a replicated one."""
        spec, full = self.program.spec, self.block.arrays[f"result {name}"]
        split = spec.outputs[name]
        used = {axis for axis in split if axis is not None} | {"pipeline"}
        if any(n for axis, n in self.program.coordinates.items() if axis not in used):
            return
        chunk_axis = spec.axes.get(name)
        if chunk_axis is None:
            self.program._shard(split, full).copy_(x)
            return
        for into, piece in zip(full.chunk(spec.chunks, chunk_axis), x.chunk(spec.chunks, chunk_axis), strict=True):
            self.program._shard(split, into).copy_(piece)


if __name__ == "__main__":
    main()
