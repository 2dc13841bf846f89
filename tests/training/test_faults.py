"""Processes that are killed, frozen, cut off or told to end; ``benchmarks/bench_faults.py`` runs many of these."""

from __future__ import annotations

import gc
import signal

import fault_runs
import numpy as np
import pytest
from fault_runs import PROGRAM, check, undisturbed
from rank_programs import SECONDS, started

import mithril as ml
from mithril.models import Linear

FAST = ("jax", "freeze")
RUNS = [FAST, ("torch", "freeze"), *((engine, kind) for kind in ("kill", "partition") for engine in ("jax", "torch"))]


@pytest.mark.parametrize(
    ("engine", "kind"), [pytest.param(*run, marks=() if run == FAST else pytest.mark.soak) for run in RUNS]
)
def test_training_resumes_to_the_bit_after_a_fault(engine, kind):
    pytest.importorskip(engine)
    if kind == "partition" and not fault_runs.can_cut_networks():
        pytest.skip("this user cannot create network namespaces")
    check(engine, kind, 1, undisturbed(engine))


def test_sigterm_of_one_process_saves_and_ends_all(tmp_path):
    pytest.importorskip("torch")
    with started(tmp_path, "torch", PROGRAM, str(tmp_path / "run"), "parts") as processes:
        for line in processes[0].stdout:
            if line == "step 5\n":
                processes[1].send_signal(signal.SIGTERM)
        lines = [process.communicate(timeout=SECONDS)[0].splitlines() for process in processes]
        assert [process.returncode for process in processes] == [-signal.SIGTERM] * 2
    saved = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert len(saved) == 2
    last = int(saved[-1].removeprefix("step-"))
    assert 5 <= last < fault_runs.STEPS
    assert lines[1][-1] == f"step {last}"
    assert (tmp_path / "run" / saved[-1] / "commit.json").exists()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of tasks of Orbax that have failed
@pytest.mark.parametrize(
    ("engine", "format", "library"),
    [
        ("numpy", "parts", "numpy"),
        ("torch", "dcp", "torch"),
        ("jax", "orbax", "orbax.checkpoint"),
    ],
)
def test_full_disk_loses_no_checkpoint(engine, format, library, tmp_path):
    """Limit the size of files, which fails like a full disk, and for every user."""
    resource = pytest.importorskip("resource")
    pytest.importorskip(library)
    rows = np.random.default_rng(0).normal(size=(32, 64)).astype(np.float32)

    def fit(epochs):
        saved = ml.Checkpoint(tmp_path, every=2, format=format)
        trainer = ml.Trainer(
            Linear(64, 64), ml.Adam(0.01), loss="mse_loss", backend=engine, progress=False, callbacks=[saved]
        )
        trainer.fit({"input": rows, "target": rows[::-1]}, epochs, batch_size=8, resume="auto")
        return trainer

    fit(1)
    before = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (12_000, limits[1]))
    try:
        with pytest.raises(ml.MithrilError, match="free space"):
            fit(3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == before
    resumed = fit(3)
    assert len(resumed.history.steps) == 12
    gc.collect()  # while those warnings are ignored
