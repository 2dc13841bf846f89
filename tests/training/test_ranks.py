"""Training by two processes: equal to one, one set of logs, one checkpoint, and errors that name the process."""

from __future__ import annotations

import json
import os
import shutil

import numpy as np
import pytest
from rank_programs import UNSHARE, can_unshare, outputs

import mithril as ml
from mithril.models import IOKey, Linear, Model, Relu

ENGINES = ["jax", "torch"]


@pytest.fixture(params=ENGINES)
def engine(request):
    pytest.importorskip(request.param)
    return request.param


def one_process(epochs):
    """Train the model of the programs in this process."""
    numbers = np.random.default_rng(0)
    x = numbers.standard_normal((99, 6), dtype=np.float32)
    y = x[:, :1] * x[:, 1:2]
    model = Model.create(outputs={"y": Linear(1, name="b")(Relu()(Linear(8, name="a")(IOKey("x"))))})
    trainer = ml.Trainer(model, ml.Adam(0.01), loss="mse_loss", backend="numpy", progress=False)
    loader = ml.DataLoader({"x": x, "target": y}, 12, shuffle=True, seed=3)
    history = trainer.fit(loader, epochs, validation={"x": x[:7], "target": y[:7]})
    return history, trainer.predict(x[:5])


PROGRAM = """
    folder = sys.argv[2]
    small = {"x": X[:7], "target": Y[:7]}
    logs = [ml.CSVLog(folder + "/log.csv"), ml.JSONLog(folder + "/log.json"), ml.TensorBoard(folder + "/board")]
    t = trainer(callbacks=[ml.Checkpoint(folder + "/run", every=4), *logs, ml.EarlyStopping("loss")])
    t.fit(loader(), epochs=2, validation=small)
    losses = {"loss": t.history["loss"], "val_loss": t.history["val_loss"], "steps": t.history.steps}
    own = trainer()
    own.fit(loader(rank=rank, world=size), epochs=2)
    resumed = trainer()
    resumed.fit(loader(), epochs=3, resume=folder + "/run")
    say(__import__("json").dumps({
        **losses, "predicted": t.predict(X[:5]).ravel().tolist(), "own rows": own.history["loss"],
        "resumed": resumed.history["loss"], "steps resumed": resumed.steps,
    }))
    try:
        trainer().fit(ml.DataLoader({"x": X[rank:], "target": Y[rank:]}, 12), 1)
    except ml.InputError as error:
        say("different batches:", "ml.DataLoader(..., rank=rank, world=world)" in str(error))
    try:
        trainer().fit(loader(rank=0, world=size), 1)
    except ml.InputError as error:
        say("rows of another:", "process 1 of 2 reads the rows of rank=0" in str(error) and "rank=1" in str(error))
    try:
        trainer(seed=rank).fit(loader(), 1)
    except ml.BackendError as error:
        say("different seeds:", "seed: process 0: 0; process 1: 1" in str(error))
    if engine == "torch":
        from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
        rows = TensorDataset(torch.from_numpy(X[:96]), torch.from_numpy(Y[:96]))
        sampler = DistributedSampler(rows, size, rank, shuffle=False)
        sampled, whole = trainer(), trainer()
        sampled.fit(DataLoader(rows, 6, sampler=sampler), 1)
        order = np.arange(96).reshape(-1, size).T.reshape(size, -1, 6).transpose(1, 0, 2).ravel()
        whole.fit(ml.DataLoader({"x": X[order], "target": Y[order]}, 12), 1)
        say("sampled:", sampled.history.steps == whole.history.steps)
"""


def test_two_containers_train_like_one_process(engine, tmp_path):
    """99 rows by 12, in two numberings of processes with one folder: uneven batches, logs, checkpoints, own rows."""
    printed = outputs(tmp_path, engine, PROGRAM, str(tmp_path), prefix=UNSHARE if can_unshare() else ())
    history, predicted = one_process(3)
    for text in printed:
        lines = [line for line in text.splitlines() if not line.startswith("[Gloo]") and line]
        results = json.loads(lines[0])
        for name in ("loss", "val_loss"):
            np.testing.assert_allclose(results[name], history[name][:2], rtol=1e-5)
        np.testing.assert_allclose(results["own rows"], history["loss"][:2], rtol=1e-5)
        assert results["resumed"][:2] == results["loss"]
        np.testing.assert_allclose(results["resumed"], history["loss"], rtol=1e-5)
        assert results["steps resumed"] == 27
        expected = ["different batches: True", "rows of another: True", "different seeds: True"]
        assert lines[1:] == [*expected, *["sampled: True"][: engine == "torch"]]
    assert predicted.shape == (5, 1)
    assert len((tmp_path / "log.csv").read_text().splitlines()) == 3  # one header, two epochs
    assert len((tmp_path / "log.json").read_text().splitlines()) == 2
    assert len(os.listdir(tmp_path / "board")) == 1
    saved = tmp_path / "run" / "step-00000018"
    assert sorted(os.listdir(tmp_path / "run")) == ["step-00000016", "step-00000018"]
    assert len(os.listdir(saved)) == 3
    sizes = [file.stat().st_size for file in saved.glob("part-*")]
    assert max(sizes) < 0.7 * sum(sizes), "each process writes its parts"


NODES = """
    folder = f"{sys.argv[2]}/node{rank}"
    t = trainer(callbacks=[ml.Checkpoint(folder, every=3, keep=9)])
    t.fit(loader(), int(sys.argv[3]), resume="auto")
    say(t.first_epoch, t.steps, repr(t.history.steps))
"""


def test_ranks_resume_from_the_latest_checkpoint_of_all(engine, tmp_path):
    """Disks of nodes with different steps: training on from mixed steps would be silently wrong."""
    undisturbed = outputs(tmp_path, engine, NODES, str(tmp_path), "2")
    steps = ["step-00000003", "step-00000006", "step-00000009", "step-00000012", "step-00000015", "step-00000018"]
    for node, count in (("node0", 4), ("node1", 3)):
        assert sorted(os.listdir(tmp_path / node)) == steps
        for name in steps[count:]:
            shutil.rmtree(tmp_path / node / name)
    assert outputs(tmp_path, engine, NODES, str(tmp_path), "2") == undisturbed
