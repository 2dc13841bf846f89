"""Makes the folder importable, so that spawned workers find the datasets of the tests."""

import sys
from pathlib import Path

import pytest

import mithril as ml

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def usable():
    """Skips where a backend is installed but cannot be made here (no device, no library, not finished)."""

    def check(name):
        try:
            ml.plugins.backend_class(name)()
        except ml.MithrilError as error:
            pytest.skip(f"{name}: {error.what}")

    return check
