"""Compile a model for every backend that is installed, run it, and compare the results."""

from __future__ import annotations

import time

import numpy as np

import mithril as ml
from mithril import plugins


def run_everywhere(model, inputs, seed=0, **options):
    """Print one line per backend: output shapes, time of a call, largest difference from the first backend.

    Gives the outputs by backend. Every backend starts from the same parameters: they depend on the seed and names only.
    """
    shapes = {name: list(array.shape) for name, array in inputs.items()}
    options = {"shapes": shapes, "inference": True} | options
    results = {}
    for name in plugins.backends():
        try:
            compiled = ml.compile(model, name, **options)
        except (ml.PluginError, ml.BackendError) as error:
            print(f"{name:8} {error.what}")
            continue
        params = compiled.randomize_params(seed)
        compiled.evaluate(params, inputs)
        start = time.perf_counter()
        outputs = compiled.evaluate(params, inputs)
        outputs = {key: compiled.backend.to_numpy(value) for key, value in outputs.items()}
        elapsed = time.perf_counter() - start
        results[name] = outputs
        first = next(iter(results.values()))
        difference = max(float(np.abs(outputs[key] - first[key]).max()) for key in outputs)
        sizes = ", ".join(f"{key} {list(value.shape)}" for key, value in outputs.items())
        print(f"{name:8} {sizes}  {elapsed * 1e3:8.1f} ms  apart {difference:.1e}")
    return results
