"""Every test that takes ``backend`` runs on each backend installed that computes in float32 on this machine."""

from __future__ import annotations

import pytest

from mithril import plugins


def pytest_generate_tests(metafunc):
    if "backend" in metafunc.fixturenames:
        metafunc.parametrize(
            "backend", [name for name in ("numpy", "jax", "torch", "mlx", "c", "ggml") if usable(name)]
        )


def usable(name):
    return name in plugins.backends()


@pytest.fixture
def seed():
    return 3
