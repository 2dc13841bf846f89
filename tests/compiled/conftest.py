"""Every test that takes ``backend`` runs on each backend installed."""

from __future__ import annotations

import pytest

from mithril import plugins
from mithril.backend.source_backend import SourceBackend


def pytest_generate_tests(metafunc):
    if "python_backend" in metafunc.fixturenames:
        names = [n for n in sorted(plugins.backends()) if issubclass(plugins.backend_class(n), SourceBackend)]
        metafunc.parametrize("python_backend", names)
    elif "backend" in metafunc.fixturenames:
        metafunc.parametrize("backend", sorted(plugins.backends()))


@pytest.fixture
def rows(backend):
    """Return a leading size: a name if one program of this backend serves several sizes and can be saved, else 3."""
    claims = plugins.backend_class(backend)().capabilities
    return "B" if claims.symbolic and claims.keeps != "binary" else 3
