"""``num_threads``, and doctor's report of NumPy's BLAS."""

from __future__ import annotations

import numpy as np
import pytest

import mithril as ml
from mithril.backend import openblas
from mithril.models import Linear, Model

FOUND = openblas()


@pytest.mark.skipif(FOUND is None, reason="this NumPy multiplies by another library")
def test_threads_are_set_for_the_call_only(monkeypatch):
    before, seen = FOUND.threads(), []
    model = Model()
    model += Linear(3)
    compiled = ml.compile(model, "numpy", shapes={"input": [2, 5]}, num_threads=before + 1)
    matmul = np.matmul
    monkeypatch.setattr(np, "matmul", lambda *a, **k: (seen.append(FOUND.threads()), matmul(*a, **k))[1])
    compiled.evaluate(compiled.randomize_params(0), {"input": np.ones((2, 5), np.float32)})
    assert seen == [before + 1]
    assert FOUND.threads() == before


def test_another_library_is_said(monkeypatch):
    monkeypatch.setattr("mithril_numpy.backend.openblas", lambda: None)
    model = Model()
    model += Linear(3)
    compiled = ml.compile(model, "numpy", shapes={"input": [2, 5]}, num_threads=2)
    assert "num_threads=2" in str(compiled.decisions)


def test_doctor_knows_the_kernels():
    facts = ml.NumpyBackend.diagnose()
    assert "products" in facts
    if FOUND is not None:
        assert FOUND.kernels() in facts["products"]
