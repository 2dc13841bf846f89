"""Cases that run in several processes, started once for all of them: a case raises an error, or returns nothing."""

from __future__ import annotations

import os
import time
import traceback

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

ENGINES = ("torch.distributed.fsdp", "torch.distributed.pipelining")


def run_cases(module, names, count, folder, seconds=240):
    """Run functions of a test module in ``count`` processes; return the error of each case, or an empty text.

    A name may have the form ``module.function``.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["mithril_torch.module", "mithril_parallel.sharding.api", *ENGINES])
    processes = [context.Process(target=_work, args=(module, names, k, count, str(folder))) for k in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(seconds)
        process.kill()
    errors = dict.fromkeys(names, "")
    for name in names:
        for rank in range(count):
            file = folder / f"{name}.{rank}"
            if not file.exists():
                errors[name] += f"process {rank} did not finish this case\n"
            else:
                errors[name] += file.read_text()
    return errors


def _work(module, names, rank, count, folder):
    from importlib import import_module

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(count), LOCAL_RANK=str(rank))
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=count)
    for name in names:
        start = time.perf_counter()
        try:
            owner, _, function = name.rpartition(".")
            getattr(import_module(owner or module), function)()
            error = ""
        except BaseException:
            error = f"process {rank}: {traceback.format_exc()}"
        if rank == 0 and "TIMES" in os.environ:
            print(f"{name}: {time.perf_counter() - start:.1f} s", flush=True)
        with open(f"{folder}/{name}.{rank}", "w") as file:
            file.write(error)
        if error:
            break  # the other processes may wait for this one
        dist.barrier()
    os._exit(0)
