"""The recorded archives, and changed copies of them."""

import io
import json
import zipfile
from pathlib import Path

import numpy as np

RECORDS = Path(__file__).parent / "records"
NAMES = sorted(p.stem for p in RECORDS.glob("*.keras"))


def record(name):
    """Return the path of an archive, its inputs, and the outputs of Keras in their order."""
    arrays = np.load(RECORDS / f"{name}.npz")
    inputs = {n.removeprefix("input_"): arrays[n] for n in arrays.files if n.startswith("input_")}
    outputs = [arrays[f"output_{k}"] for k in range(sum(n.startswith("output_") for n in arrays.files))]
    return RECORDS / f"{name}.keras", inputs, outputs


def statistics(name):
    """Return the states that Keras computed in a call in training."""
    arrays = np.load(RECORDS / f"{name}.npz")
    return {n.removeprefix("state_"): arrays[n] for n in arrays.files if n.startswith("state_")}


def members(path):
    with zipfile.ZipFile(path) as z:
        return {n: z.read(n) for n in z.namelist()}


def write(path, content):
    with zipfile.ZipFile(path, "w") as z:
        for name, data in content.items():
            z.writestr(name, data)
    return path


def changed(name, path, edit):
    """Write a copy of a record whose configuration ``edit`` changed in place."""
    content = members(RECORDS / f"{name}.keras")
    config = json.loads(content["config.json"])
    edit(config)
    content["config.json"] = json.dumps(config).encode()
    return write(path, content)


def with_weights(name, path, edit):
    """Write a copy of a record whose file of weights ``edit`` changed through h5py."""
    import h5py

    content = members(RECORDS / f"{name}.keras")
    data = io.BytesIO(content["model.weights.h5"])
    with h5py.File(data, "r+") as file:
        edit(file)
    content["model.weights.h5"] = data.getvalue()
    return write(path, content)
