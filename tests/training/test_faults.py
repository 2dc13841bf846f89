"""Processes that are killed, frozen, cut off or told to end; ``benchmarks/bench_faults.py`` runs many of these."""

from __future__ import annotations

import gc

import fault_runs
import numpy as np
import pytest
from fault_runs import KINDS, LAUNCHERS, check

import mithril as ml
from mithril.models import Linear

SHORT = [("jax", ("full disk", "corrupt", "freeze")), ("torch", ("slow", "terminate one"))]
LONG = [(launcher, kind, then) for launcher in LAUNCHERS for kind in KINDS for then in (2, 1, 3)]


@pytest.mark.parametrize(("launcher", "kinds"), SHORT)
def test_one_process_resumes_after_faults_of_two(launcher, kinds):
    pytest.importorskip("resource")
    pytest.importorskip(launcher)
    check(launcher, kinds, then=1, exact=False)


@pytest.mark.soak
@pytest.mark.parametrize(("launcher", "kind", "then"), LONG)
def test_training_resumes_after_a_fault(launcher, kind, then):
    pytest.importorskip(launcher.removesuffix("run"))
    if kind == "partition" and (launcher == "torchrun" or not fault_runs.can_cut_networks()):
        pytest.skip("torchrun runs on one machine here, or this user cannot create network namespaces")
    check(launcher, [kind], then=then)


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
