"""LoRA on every layer with a matrix: trained, merged, and written to a file that is read back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import mithril as ml
from mithril_lora import LoRA, adapter_parameters, adapter_patterns, merge

STEPS = 20


def train_merge_and_write(
    model: Any, paths: Sequence[str], inputs: dict[str, Any], backend: str, folder: Path, formats: dict[str, Any]
) -> None:
    """Check that the loss falls, the base stays, and the merged model and its files give the trained results."""
    plain = ml.compile(model, "numpy", inference=True)(inputs)
    for path in paths:
        pattern, _, target = path.partition(":")  # of a layer, and of its matrix
        model.replace(pattern, LoRA(rank=8, alpha=16, target=target or "weight"))
    rng = np.random.default_rng(0)
    targets = {n: np.asarray(y + rng.normal(size=y.shape), np.float32) for n, y in plain.items()}
    options: dict[str, Any] = {"backend": backend, "trainable": adapter_patterns(model), "seed": 0, "progress": False}
    trainer = ml.Trainer(model, ml.Adam(1e-2), loss=dict.fromkeys(plain, "mse"), **options)
    trainer.begin({**inputs, **targets})
    before = host(trainer.compiled, trainer.params)
    trainer.fit([{**inputs, **targets}], epochs=STEPS)
    losses, params = trainer.history["loss"], host(trainer.compiled, trainer.params)
    assert len(losses) == STEPS
    assert losses[-1] < 0.9 * losses[0]
    trained = {n for n, x in params.items() if not np.array_equal(x, before[n])}
    small = set(adapter_parameters(params))
    assert {n for n in small if ".experts." not in n} <= trained <= small  # the router may select no row for an expert
    expected = results(ml.compile(model, backend, inference=True).bind(params), inputs)
    merged = merge(model, params)
    assert set(merged) == set(params) - small
    assert not [layer for _, layer in model.walk() if type(layer).__name__.startswith("LowRank")]
    compiled = ml.compile(model, backend, inference=True).bind(merged)
    equal(results(compiled, inputs), expected)
    for suffix, settings in formats.items():
        compiled.export(folder / f"merged.{suffix}", **settings)
        again = ml.load(folder / f"merged.{suffix}", backend="numpy")
        equal(dict(zip(expected, results(again, inputs).values(), strict=True)), expected)


def host(compiled: Any, arrays: Any) -> dict[str, Any]:
    return {n: np.array(compiled.backend.to_numpy(x)) for n, x in arrays.items()}


def results(compiled: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    return host(compiled, compiled(inputs))


def equal(values: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, y in expected.items():
        scale = max(1.0, float(np.abs(y).max()))
        np.testing.assert_allclose(values[name], y, rtol=1e-4, atol=1e-4 * scale, err_msg=name)
