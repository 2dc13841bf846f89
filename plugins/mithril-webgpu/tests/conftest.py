"""Tests need a driver. Without one they are skipped, with the remedy, and fail in continuous integration."""

import os
import sys
from pathlib import Path

import pytest

from mithril_webgpu.host import WebGPUHost

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER))  # the helpers next to this file
sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))


def pytest_collection_modifyitems(items):
    # The hook sees the tests of all folders of a run.
    device_tests = [item for item in items if item.path.is_relative_to(FOLDER)]
    if device_tests and not WebGPUHost.devices() and not os.environ.get("MITHRIL_REQUIRE_DEVICES"):
        for item in device_tests:
            if item.get_closest_marker("no_device") is None:
                item.add_marker(pytest.mark.skip(reason=f"no WebGPU device: {WebGPUHost.remedy}"))


def pytest_configure(config):
    config.addinivalue_line("markers", "no_device: a test of text, which needs no driver")
