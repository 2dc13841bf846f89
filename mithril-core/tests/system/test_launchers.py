"""Which launcher started this process, from the variables that each of them sets."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from mithril import BackendError
from mithril.system import LaunchedTask, launched_task, shared_attempt
from mithril.system.launchers import first_host

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "40123",
    "SLURM_STEP_NODELIST": "gpu[03-06]",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
KUBERNETES = {"JOB_COMPLETION_INDEX": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "job-0.job", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (TORCHRUN, LaunchedTask("torchrun", 3, 8, 1, "a", 29500)),
        (SLURM, LaunchedTask("Slurm", 5, 8, 1, "gpu03", 15000 + 40123 % 20000)),
        ({**SLURM, "MASTER_ADDR": "b", "MASTER_PORT": "1"}, LaunchedTask("Slurm", 5, 8, 1, "b", 1)),
        ({**OPEN_MPI, "MASTER_PORT": "7"}, LaunchedTask("Open MPI", 1, 2, 1, "127.0.0.1", 7)),
        (KUBERNETES, LaunchedTask("Kubernetes", 2, 4, 0, "job-0.job", 29500)),
        ({**SLURM, **TORCHRUN}, LaunchedTask("torchrun", 3, 8, 1, "a", 29500)),
        ({}, None),
        ({"SLURM_NTASKS": "8"}, None),  # in the batch script, outside of srun
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, None),
        ({"JOB_COMPLETION_INDEX": "2"}, None),  # independent pods
    ],
)
def test_a_task_is_read_from_the_variables_of_its_launcher(variables, expected):
    assert launched_task(variables) == expected


def test_processes_on_several_machines_need_an_address():
    task = launched_task({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"})
    with pytest.raises(BackendError, match="Open MPI started 2 processes, but does not say where the first one is"):
        task.torch_environment()


def test_torch_reads_the_task_as_that_of_torchrun():
    environment = launched_task(SLURM).torch_environment()
    assert launched_task(environment) == LaunchedTask("torchrun", 5, 8, 1, "gpu03", 15123)


def test_a_wrong_variable_is_named():
    with pytest.raises(BackendError, match="the environment variable RANK is 'x', expected a number"):
        launched_task({**TORCHRUN, "RANK": "x"})


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("gpu03", "gpu03"),
        ("gpu[03-07,9],login1", "gpu03"),
        ("gpu[3,5]", "gpu3"),
        ("a1,b2", "a1"),
        ("rack[1-2]-node", "rack1-node"),
    ],
)
def test_the_first_host_of_a_list_of_nodes(nodes, host):
    assert first_host(nodes) == host


def _attempt(store, size=3, present=None, seconds=5.0):
    """Return the result of each process of one attempt on a store; those that are not ``present`` do not start."""
    ranks = range(size) if present is None else present
    with ThreadPoolExecutor(size) as pool:
        futures = {k: pool.submit(shared_attempt, k, size, store.__setitem__, store.get, seconds) for k in ranks}
        return {k: f.exception() or f.result() for k, f in futures.items()}


def test_each_attempt_of_a_job_has_a_text_of_its_own():
    store = {}  # of an agent, which survives restarts
    texts = [set(_attempt(store).values()) for _ in range(20)]
    assert all(len(shared) == 1 for shared in texts)
    assert len(set.union(*texts)) == 20


@pytest.mark.parametrize("present", [[0, 1], [1, 2], [0]])
def test_attempt_that_ended_while_it_started_does_not_affect_the_next_one(present):
    store = {}
    errors = _attempt(store, present=present, seconds=0.1)
    assert all("did not arrive at: the start of the job" in str(error) for error in errors.values())
    before = set(store.values())
    (text,) = set(_attempt(store).values())
    assert text not in before


def test_processes_do_not_accept_an_attempt_without_its_process_0():
    store = {}
    _attempt(store)
    errors = _attempt(store, present=[1, 2], seconds=0.1)
    assert all(str(error).startswith("process 0 did not arrive") for error in errors.values())
