"""Twelve models on every kind of mesh equal one device, also with a batch that no mesh divides.

One combination is tested each day; ``nox -s soak`` tests all of them.
"""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import product

import pytest
from models_on_meshes import MODELS, WAYS, difference

pytest.importorskip("mithril_train")
COMBINATIONS = list(product(MODELS, WAYS))
TODAY = COMBINATIONS[datetime.now(UTC).toordinal() * 31 % len(COMBINATIONS)]


@pytest.mark.parametrize(
    ("model", "way"), [pair if pair == TODAY else pytest.param(*pair, marks=pytest.mark.soak) for pair in COMBINATIONS]
)
def test_models_on_meshes_equal_one_device(model, way):
    assert difference(model, way) < (2e-2 if "bfloat16" in model else 1e-4)
