"""Small models on every kind of mesh equal one device, also with a batch that no mesh divides.

One combination is tested each day; ``nox -s soak`` tests all of them.
"""

from __future__ import annotations

import pytest

import mithril as ml

pytest.importorskip("mithril_lora")
pytest.importorskip("mithril_train")

from models_on_meshes import WAYS
from trained_models import combinations, difference, limit, of_today

PAIRS = combinations(WAYS)
TODAY = of_today(PAIRS)


@pytest.mark.parametrize(
    ("model", "way"), [pair if pair == TODAY else pytest.param(*pair, marks=pytest.mark.soak) for pair in PAIRS]
)
def test_models_on_meshes_equal_one_device(model, way):
    assert difference(model, ml.JaxBackend, WAYS[way]) < limit(model)
