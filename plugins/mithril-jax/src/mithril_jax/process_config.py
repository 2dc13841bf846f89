"""What JAX takes from the process when it is first used, and never again: memory, threads, devices of the CPU."""

from __future__ import annotations

import os
from glob import glob

import jax

from mithril.base import BackendError, OptionError

_PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
_POOL = "NPROC"  # XLA sizes its pool by this variable, else by the number of cores


# Where libtpu is installed for its compiler and no TPU is here, JAX's start would fill stderr with its complaints.
if not glob("/dev/accel*") and not glob("/dev/vfio/*"):
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-8")


def started() -> bool:
    """Whether JAX has made its devices."""
    from jax._src import xla_bridge

    return bool(xla_bridge.backends_are_initialized())


def pre_allocate(wanted: bool) -> None:
    """Let XLA take most of a GPU's memory at once, or piece by piece."""
    value = "true" if wanted else "false"
    if os.environ.get(_PREALLOCATE, value) != value:
        raise OptionError(
            f"pre_allocate={wanted} contradicts the environment variable {_PREALLOCATE}",
            facts=[f"{_PREALLOCATE}={os.environ[_PREALLOCATE]}"],
            hint="set one of them",
        )
    late = started() and _PREALLOCATE not in os.environ
    if late and jax.default_backend() == "gpu":
        raise BackendError(
            f"pre_allocate={wanted} comes too late: JAX already runs",
            facts=["XLA decides about a GPU's memory when it is first used"],
            hint=f"make this backend before anything uses JAX, or set {_PREALLOCATE}={value}",
        )
    if not late:
        os.environ[_PREALLOCATE] = value


def threads() -> int:
    """How many threads XLA's pool for the CPU has."""
    value = os.environ.get(_POOL, "")
    if value.isdigit():
        return int(value)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def limit_threads(count: int) -> None:
    """Size XLA's pool, which all programs of the process share."""
    if started() and threads() != count:
        raise BackendError(
            f"num_threads={count} comes too late: JAX already runs with {threads()} threads",
            facts=["XLA makes one pool of threads when it is first used"],
            hint=f"make this backend before anything uses JAX, or set the environment variable {_POOL}={count}",
        )
    os.environ[_POOL] = str(count)


def simulate_devices(count: int) -> None:
    """Make JAX show at least ``count`` devices of the CPU.

    XLA gives the exchanges between them a thread each: with fewer threads than devices they wait forever.
    """
    if started() or jax.distributed.is_initialized():  # of several processes each says how many devices it brings
        return
    os.environ.setdefault(_POOL, str(max(os.cpu_count() or 1, 2 * count + 8)))
    if jax.config.jax_num_cpu_devices < count:
        jax.config.update("jax_num_cpu_devices", count)
