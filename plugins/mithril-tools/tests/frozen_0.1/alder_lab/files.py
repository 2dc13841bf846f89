# Frozen with mithril 0.1: never edit this file. Later versions must run it unchanged.
"""A file format: the graph as text with its parameters."""

import json
from pathlib import Path

import numpy as np

import mithril as ml


def save(compiled, path):
    params = {name: np.asarray(compiled.backend.to_numpy(array)) for name, array in compiled.params.items()}
    data = {
        "graph": str(compiled.programs[-1].traced),
        "params": {name: {"dtype": str(array.dtype), "data": array.tolist()} for name, array in params.items()},
    }
    path = Path(path)
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


def load(path, *, backend="numpy"):
    data = json.loads(Path(path).read_text(encoding="utf-8"))
    compiled = ml.compile(model(path), backend)
    arrays = {name: np.array(p["data"], p["dtype"]) for name, p in data["params"].items()}
    return compiled.bind({name: compiled.backend.array(array) for name, array in arrays.items()})


def model(path):
    return ml.parse(json.loads(Path(path).read_text(encoding="utf-8"))["graph"])
