"""What all tests share."""

import numpy as np
import pytest


@pytest.fixture(autouse=True)
def drawn_anew(request):
    """The module's generator begins anew, so that a test's numbers do not depend on the tests before it."""
    if hasattr(request.module, "rng"):
        request.module.rng = np.random.default_rng(0)
