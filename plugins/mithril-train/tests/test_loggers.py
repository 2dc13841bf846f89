"""Loggers: TensorBoard's event files, and libraries of the shapes of Weights & Biases and MLflow."""

import struct
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from small import X, Y, trainer

import mithril as ml
from mithril.graph.errors import PluginError
from mithril_train.loop.event_files import EventFile, _masked_crc


def fields(data):
    """Yield the fields of a protocol buffer, decoded by the rules of its wire format."""
    offset = 0

    def varint():
        nonlocal offset
        number = shift = 0
        while True:
            byte = data[offset]
            offset += 1
            number |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return number

    while offset < len(data):
        tag = varint()
        kind = tag & 7
        if kind == 0:
            yield tag >> 3, varint()
            continue
        size = {1: 8, 5: 4}.get(kind) or varint()
        yield tag >> 3, data[offset : offset + size]
        offset += size


def read(folder):
    """Return the scalars of the event file of a folder, after a check of its checksums."""
    (path,) = folder.iterdir()
    data, offset, scalars = path.read_bytes(), 0, []
    while offset < len(data):
        (size,) = struct.unpack_from("<Q", data, offset)
        record = data[offset + 12 : offset + 12 + size]
        assert struct.unpack_from("<I", data, offset + 8)[0] == _masked_crc(data[offset : offset + 8])
        assert struct.unpack_from("<I", data, offset + 12 + size)[0] == _masked_crc(record)
        offset += 16 + size
        event = dict(fields(record))
        for _, value in fields(event.get(5, b"")):
            parts = dict(fields(value))
            scalars.append((event.get(2, 0), parts[1].decode(), struct.unpack("<f", parts[2])[0]))
    return scalars


def test_checksums_are_those_of_the_format():
    """Compare with the vectors of RFC 3720 for CRC-32C, rotated and shifted as in TensorFlow's records."""
    for data, crc in ((bytes(32), 0x8A9136AA), (b"\xff" * 32, 0x62A8AB43), (bytes(range(32)), 0x46DD794E)):
        assert _masked_crc(data) == ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def test_events_are_those_of_the_protocol(tmp_path):
    writer = EventFile(tmp_path)
    writer.scalars(300, {"loss": 0.5, "val/accuracy": 0.25})
    writer.close()
    assert read(tmp_path) == [(300, "loss", 0.5), (300, "val/accuracy", 0.25)]


def test_tensorboard_has_every_step_and_epoch(tmp_path):
    subject = trainer(metrics="accuracy")
    subject.fit(X, Y, 2, batch_size=16, validation=(X, Y), callbacks=[ml.TensorBoard(tmp_path / "run")])
    rows = read(tmp_path / "run")
    losses = [(step, x) for step, name, x in rows if name == "loss"]
    assert [step for step, _ in losses] == list(range(1, 13))
    np.testing.assert_allclose([x for _, x in losses], subject.history.steps, rtol=1e-6)
    epochs = [(step, x) for step, name, x in rows if name == "epoch/val_accuracy"]
    assert [step for step, _ in epochs] == [6, 12]
    np.testing.assert_allclose([x for _, x in epochs], subject.history["val_accuracy"], rtol=1e-6)
    assert {x for _, name, x in rows if name == "learning_rate"} == {np.float32(0.01)}


class Run:
    """A run of wandb, as far as the logger uses it."""

    def __init__(self, **settings):
        self.settings, self.rows, self.finished = settings, [], False

    def log(self, values, step=None):
        self.rows.append((step, values))

    def finish(self):
        self.finished = True


def test_weights_and_biases(monkeypatch):
    runs = []
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **s: runs.append(Run(**s)) or runs[-1]))
    trainer().fit(X, Y, 1, batch_size=16, callbacks=[ml.WandB(project="digits", every=2)])
    (run,) = runs
    assert run.settings["project"] == "digits"
    assert "Adam" in run.settings["config"]["optimizer"]
    assert [step for step, _ in run.rows] == [2, 4, 6, 6]
    assert set(run.rows[0][1]) == {"loss", "learning_rate"}
    assert set(run.rows[-1][1]) == {"epoch/loss"}
    assert run.finished
    open_run = Run()
    trainer().fit(X, Y, 1, batch_size=16, callbacks=[ml.WandB(open_run)])
    assert len(open_run.rows) == 7
    assert not open_run.finished, "a run of the caller stays open"


def test_mlflow(monkeypatch):
    calls = []

    def record(name):
        return lambda *args, **options: calls.append((name, args, options))

    names = ("start_run", "log_params", "log_metrics", "end_run")
    library = SimpleNamespace(active_run=lambda: None, **{n: record(n) for n in names})
    monkeypatch.setitem(sys.modules, "mlflow", library)
    trainer().fit(X, Y, 1, batch_size=48, callbacks=[ml.MLflow(run_name="first")])
    assert [name for name, _, _ in calls] == [
        "start_run",
        "log_params",
        "log_metrics",
        "log_metrics",
        "log_metrics",
        "end_run",
    ]
    assert calls[0][2] == {"run_name": "first"}
    assert [options["step"] for name, _, options in calls if name == "log_metrics"] == [1, 2, 2]


@pytest.mark.parametrize(("kind", "name"), [(ml.WandB, "wandb"), (ml.MLflow, "mlflow")])
def test_a_missing_library_is_named(kind, name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(PluginError, match=rf'pip install "mithril-train\[{name}\]"'):
        trainer().fit(X, Y, 1, callbacks=[kind()])
