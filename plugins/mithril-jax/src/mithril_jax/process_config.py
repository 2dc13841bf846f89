"""Process settings that JAX reads once, at its first use: GPU memory, threads, simulated CPU devices."""

from __future__ import annotations

import os
from glob import glob

import jax

from mithril.graph import BackendError, OptionError

_PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
_POOL = "NPROC"  # XLA sizes its pool by this variable, else by the number of cores


# If libtpu is installed for its compiler on a machine without a TPU, starting JAX would print its warnings on stderr.
if not glob("/dev/accel*") and not glob("/dev/vfio/*"):
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-8")


def started() -> bool:
    """Whether JAX has initialized its devices."""
    from jax._src import xla_bridge

    return bool(xla_bridge.backends_are_initialized())


def pre_allocate(enabled: bool) -> None:
    """Make XLA reserve most of a GPU's memory at once, or allocate on demand."""
    value = "true" if enabled else "false"
    if os.environ.get(_PREALLOCATE, value) != value:
        raise OptionError(
            f"pre_allocate={enabled} conflicts with the environment variable {_PREALLOCATE}",
            facts=[f"{_PREALLOCATE}={os.environ[_PREALLOCATE]}"],
            hint="set one of them",
        )
    late = started() and _PREALLOCATE not in os.environ
    if late and jax.default_backend() == "gpu":
        raise BackendError(
            f"cannot set pre_allocate={enabled}: JAX is already initialized",
            facts=["XLA reserves a GPU's memory when it is first used"],
            hint=f"create this backend before importing code that uses JAX, or set {_PREALLOCATE}={value}",
        )
    if not late:
        os.environ[_PREALLOCATE] = value


def threads() -> int:
    """Return the number of threads in XLA's CPU pool."""
    value = os.environ.get(_POOL, "")
    if value.isdigit():
        return int(value)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def limit_threads(count: int) -> None:
    """Set the size of XLA's thread pool, which all programs of the process share."""
    if started() and threads() != count:
        raise BackendError(
            f"cannot set num_threads={count}: JAX is already initialized with {threads()} threads",
            facts=["XLA creates one thread pool when it is first used"],
            hint=f"create this backend before importing code that uses JAX, or set the variable {_POOL}={count}",
        )
    os.environ[_POOL] = str(count)


def simulate_devices(count: int) -> None:
    """Make JAX simulate at least ``count`` devices on the CPU.

    XLA runs each device's collectives on a thread of its own: with fewer threads than devices they deadlock.
    """
    # With several processes, each sets its own number of devices.
    if started() or jax.distributed.is_initialized():
        return
    os.environ.setdefault(_POOL, str(max(os.cpu_count() or 1, 2 * count + 8)))
    if jax.config.jax_num_cpu_devices < count:
        jax.config.update("jax_num_cpu_devices", count)
