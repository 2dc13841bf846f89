"""Tests need a driver. Without one they are skipped, with the remedy, and fail in continuous integration."""

import os

import pytest

from mithril_webgpu.host import INSTALL, adapters


def pytest_collection_modifyitems(items):
    if not adapters() and not os.environ.get("MITHRIL_REQUIRE_DEVICES"):
        for item in items:
            if item.get_closest_marker("no_device") is None:
                item.add_marker(pytest.mark.skip(reason=f"no WebGPU device: {INSTALL}"))


def pytest_configure(config):
    config.addinivalue_line("markers", "no_device: a test of text, which needs no driver")
