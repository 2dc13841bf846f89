"""Fixtures: a driver in main memory that runs kernels compiled as C."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the helpers next to this file

import cuda_stub

from mithril_cbackend.devices.backend import DeviceBackend
from mithril_cuda import driver, nvrtc


@pytest.fixture(scope="module")
def stub(tmp_path_factory):
    """Take the place of driver and compiler; return the control of the driver."""
    folder = tmp_path_factory.mktemp("cuda")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "LIBRARY", cuda_stub.driver(folder))
        patch.setattr(nvrtc, "compiled", cuda_stub.compiler(folder))
        patch.setattr(DeviceBackend, "hosts", {})
        yield cuda_stub.control(driver.LIBRARY)
