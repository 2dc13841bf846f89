"""Every test that takes ``backend`` runs on each backend installed."""

from __future__ import annotations

from mithril import plugins


def pytest_generate_tests(metafunc):
    if "backend" in metafunc.fixturenames:
        metafunc.parametrize("backend", sorted(plugins.backends()))
