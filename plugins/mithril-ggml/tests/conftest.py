"""Fixtures of all tests."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the helpers next to this file


@pytest.fixture(autouse=True)
def drawn_anew(request):
    """Reset the module's generator, so that the numbers of a test do not depend on the tests before it."""
    if hasattr(request.module, "rng"):
        request.module.rng = np.random.default_rng(0)


@pytest.fixture
def numpy_backend():
    """Skip if NumPy's backend is not installed."""
    import mithril as ml

    if "numpy" not in ml.plugins.backends():
        pytest.skip("mithril-numpy is not installed")
    return "numpy"
