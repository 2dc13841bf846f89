"""The processes of a pool: started from a clean interpreter, which imports PyTorch once and forks.

``python -m mithril_torch.parallel.fork_server <control> <folder> <device> <socket> ...``: the numbers are of inherited
sockets. A process ends when its socket does; all of them end when the control socket does, whatever they wait for.
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
from mithril_torch.parallel.worker import RankProgram, Spec


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
    watch.recv(1)  # nothing is ever sent: this returns when the owner closes it, or is gone
    for child in children:
        os.kill(child, signal.SIGKILL)
    for child in children:
        os.waitpid(child, 0)
    shutil.rmtree(folder, ignore_errors=True)


def _serve(connection: Connection, rank: int, world: int, folder: str, device: str) -> None:
    """Answer until nobody asks any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # that is for the owner, whose end is ours
    try:
        here = torch.device(device, rank) if device == "cuda" else torch.device(device)
        if device == "cuda":
            torch.cuda.set_device(here)
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
                _answer(word, rest, programs, here)
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
        number, sent, kept = rest
        programs[number].run(sent, kept)
    elif word == "forget":
        programs.pop(rest[0], None)


class _Loaded:
    """A program, with the memory that its arguments and results are shared through."""

    def __init__(self, spec: Spec, path: str, device: torch.device) -> None:
        if spec.threads is not None:
            torch.set_num_threads(spec.threads)
        self.program = RankProgram(spec, device)
        self.block = Block.open(path, spec)
        self.arguments: dict[str, torch.Tensor] = {}
        self.results: dict[str, torch.Tensor] = {}  # that the next call may take

    def run(self, sent: list[str], kept: list[str]) -> None:
        """``sent`` lie in the shared memory; ``kept`` are this process's own results of the last call."""
        self.arguments.update({name: self.results[name] for name in kept if name in self.program.needs})
        for name in sent:
            if name in self.program.needs:
                self.arguments[name] = self.program.part(name, self.block.arrays[name]).to(
                    self.program.device, copy=True
                )
        made = self.program(self.arguments)
        self.results = {name: x for name, x in made.items() if self.program.spec.carries(name)}
        for name, x in made.items():
            self._write(name, x)

    def _write(self, name: str, x: torch.Tensor) -> None:
        """Into this process's part of a result; what all have, the first writes."""
        spec, whole = self.program.spec, self.block.arrays[f"result {name}"]
        split = spec.outputs[name]
        used = {axis for axis in split if axis is not None} | {"pipeline"}
        if any(n for axis, n in self.program.place.items() if axis not in used):
            return
        at = spec.axes.get(name)
        if at is None:
            self.program._part(split, whole).copy_(x)
            return
        for into, piece in zip(whole.chunk(spec.chunks, at), x.chunk(spec.chunks, at), strict=True):
            self.program._part(split, into).copy_(piece)


if __name__ == "__main__":
    main()
