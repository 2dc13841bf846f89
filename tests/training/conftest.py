"""Every test that takes ``backend`` runs on each backend that can be used here."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mithril import plugins
from mithril.graph.errors import MithrilError

sys.path.insert(0, str(Path(__file__).parent))  # programs of several processes


def pytest_generate_tests(metafunc):
    if "backend" in metafunc.fixturenames:
        metafunc.parametrize("backend", sorted(plugins.backends()))


@pytest.fixture(autouse=True)
def usable(request):
    """Skip where a backend is installed but cannot be made here (no device, no library)."""
    name = request.node.callspec.params.get("backend") if hasattr(request.node, "callspec") else None
    if name is not None:
        try:
            plugins.backend_class(name)()
        except MithrilError as error:
            pytest.skip(f"{name}: {error.what}")
