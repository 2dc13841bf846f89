"""Write the archives of the tests, with inputs and outputs: ``KERAS_BACKEND=numpy python record_archives.py``."""

from __future__ import annotations

import tempfile
import zipfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras_models import MODELS, randomize

RECORDS = Path(__file__).parent / "records"
STAMP = (2026, 1, 1, 0, 0, 0)


def outputs_of(net: Any, inputs: Any) -> list[Any]:
    """Return the results of a Keras model, in the order of its outputs."""
    results = net(inputs if len(inputs) > 1 else next(iter(inputs.values())))
    if isinstance(results, dict):
        results = list(results.values())
    return [keras.ops.convert_to_numpy(r) for r in (results if isinstance(results, (list, tuple)) else [results])]


def record(name: str) -> None:
    """Write one archive, deflated, and the results of Keras."""
    net, inputs = MODELS[name]()
    randomize(net)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.keras"
        net.save(path)
        with zipfile.ZipFile(path) as old, zipfile.ZipFile(RECORDS / f"{name}.keras", "w") as new:
            for info in old.infolist():
                compression = zipfile.ZIP_STORED if name == "mixed" else zipfile.ZIP_DEFLATED
                new.writestr(zipfile.ZipInfo(info.filename, STAMP), old.read(info), compression, 9)
    arrays = {f"output_{k}": v for k, v in enumerate(outputs_of(net, inputs))}
    if name == "images":  # statistics after a call in training, before any random numbers
        net(next(iter(inputs.values())), training=True)
        statistics = [v for v in net.weights if "moving" in v.path]
        arrays |= {f"state_{v.path.replace('/', '.')}": np.asarray(v) for v in statistics}
    np.savez_compressed(RECORDS / f"{name}.npz", **{f"input_{k}": v for k, v in inputs.items()}, **arrays)


if __name__ == "__main__":
    keras.utils.set_random_seed(0)
    RECORDS.mkdir(exist_ok=True)
    for name in MODELS:
        keras.backend.clear_session()
        record(name)
