"""Rows on a mesh of PyTorch: two processes, started once, run each row together."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import tempfile
from pathlib import Path
from typing import Any

COUNT, SECONDS = 2, 600  # the longest time that a row may take


class Ranks:
    """The processes, and the pipes to them."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.meeting = tempfile.mkdtemp()
        self.pipes, self.processes = [], []
        for rank in range(COUNT):
            local, remote = context.Pipe()
            process = context.Process(target=work, args=(remote, rank, self.meeting), daemon=True)
            process.start()
            remote.close()
            self.pipes.append(local)
            self.processes.append(process)

    def verdicts(self, row: Any, shared: Path) -> list[Any]:
        for pipe in self.pipes:
            pipe.send((row, shared))
        return [answer(pipe) for pipe in self.pipes]

    def stop(self) -> None:
        for process in self.processes:
            process.kill()


ranks: Ranks | None = None


def judge(row: Any) -> Any:
    """Return the verdict of both processes on a row; restart them after a failure, as one may wait for the other."""
    global ranks
    if ranks is None:
        ranks = Ranks()
        atexit.register(ranks.stop)
    with tempfile.TemporaryDirectory() as folder:
        verdicts = ranks.verdicts(row, Path(folder))
    worst = next((v for kind in ("failed", "refused", "missing") for v in verdicts if v.kind == kind), verdicts[0])
    if worst.kind == "failed" or any(v.kind != worst.kind for v in verdicts):
        ranks.stop()
        ranks = None
    return worst


def answer(pipe: Any) -> Any:
    from .oracle import Verdict

    try:
        if pipe.poll(SECONDS):
            return pipe.recv()
        return Verdict("failed", f"a process of the mesh takes more than {SECONDS} s")
    except EOFError:
        return Verdict("failed", "a process of the mesh ended")


def work(pipe: Any, rank: int, meeting: str) -> None:
    """Judge the rows that come through the pipe as one process of the mesh."""
    import torch
    import torch.distributed as dist

    from .oracle import Verdict, judge

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(COUNT), LOCAL_RANK=str(rank))
    dist.init_process_group("gloo", init_method=f"file://{meeting}/meeting", rank=rank, world_size=COUNT)
    while True:
        row, shared = pipe.recv()
        verdict = judge(row, shared)
        pipe.send(Verdict(verdict.kind, f"process {rank}: {verdict.text}" if verdict.text else ""))
