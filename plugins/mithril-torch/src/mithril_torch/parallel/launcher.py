"""The other processes of a mesh, for a script that no launcher started.

This process becomes the first one. Each of the others runs the same script from its beginning, as under ``torchrun``;
their standard output is discarded. All end with the first one, and a failure in one of them ends all.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import torch.multiprocessing as mp

from mithril.graph import BackendError

GRACE_SECONDS = 5  # for this process to report its own error, after another one has failed


def launch_others(count: int) -> None:
    """Start ``count - 1`` processes that run this script, and set the variables of ``torchrun`` here and there."""
    main = sys.modules["__main__"]
    module = getattr(getattr(main, "__spec__", None), "name", None)
    path = getattr(main, "__file__", None)
    if path is None or not os.path.exists(path) or "pytest" in sys.modules or "ipykernel" in sys.modules:
        raise BackendError(
            f"a mesh of {count} devices requires {count} processes, and only a script can start them",
            hint=f"save the code as train.py: python train.py, or torchrun --nproc-per-node {count} train.py",
        )
    variables = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    os.environ.update(variables, RANK="0", LOCAL_RANK="0")
    sys.stdout.flush()
    with _hidden(main):
        processes = mp.start_processes(
            _run_script,
            args=(variables, None if module in (None, "__main__") else module, path, sys.argv),
            nprocs=count - 1,
            join=False,
            daemon=True,
            start_method="spawn",
        )
    finished = threading.Event()
    watch = threading.Thread(target=_watch, args=(processes, finished), daemon=True)
    watch.start()
    atexit.register(_wait, processes, finished, watch)


def _run_script(index: int, variables: dict[str, str], module: str | None, path: str, arguments: list[str]) -> None:
    """Run the script as process ``index + 1``."""
    threading.Thread(target=_end_with_first, daemon=True).start()
    rank = str(index + 1)
    os.environ.update(variables, RANK=rank, LOCAL_RANK=rank)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.argv = arguments
    with suppress(SystemExit):  # the code of the first process counts
        if module is not None:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = os.path.dirname(os.path.abspath(path))
            runpy.run_path(path, run_name="__main__")


def _end_with_first() -> None:
    """End this process when the first one is gone, also killed: a signal could be lost in code that ignores errors."""
    first = multiprocessing.parent_process()
    if first is not None:
        first.join()
        os._exit(1)


def _watch(processes: Any, finished: threading.Event) -> None:
    """End this process if another one fails: it may wait for that one forever."""
    while not finished.is_set():
        try:
            if processes.join(timeout=0.2):
                return
        except Exception as error:  # the traceback of the other process
            finished.wait(GRACE_SECONDS)
            _fail(error)


def _wait(processes: Any, finished: threading.Event, watch: threading.Thread) -> None:
    """Let the other processes finish the script; processes that this one no longer answers are ended."""
    finished.set()
    watch.join()
    end = time.monotonic() + GRACE_SECONDS
    try:
        while time.monotonic() < end and not processes.join(timeout=0.2):
            pass
    except Exception as error:
        _fail(error)
    for process in processes.processes:
        process.terminate()


def _fail(error: Exception) -> NoReturn:
    print(f"a process of this mesh failed, so all are ended\n{error}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(1)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def _hidden(main: Any) -> Iterator[None]:
    """Hide the script from multiprocessing, which would run it while it starts a process."""
    path, spec = main.__file__, getattr(main, "__spec__", None)
    main.__spec__ = None
    del main.__file__
    try:
        yield
    finally:
        main.__file__, main.__spec__ = path, spec
