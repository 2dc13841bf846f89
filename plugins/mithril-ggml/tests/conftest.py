"""What all tests share."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the helpers beside this file


@pytest.fixture(autouse=True)
def drawn_anew(request):
    """The module's generator begins anew, so that a test's numbers do not depend on the tests before it."""
    if hasattr(request.module, "rng"):
        request.module.rng = np.random.default_rng(0)


@pytest.fixture
def numpy_backend():
    """Skips where NumPy's backend is not installed beside this one."""
    import mithril as ml

    if "numpy" not in ml.plugins.backends():
        pytest.skip("mithril-numpy is not installed")
    return "numpy"
