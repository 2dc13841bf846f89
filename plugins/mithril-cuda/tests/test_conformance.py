"""The CUDA backend on the conformance kit, by a driver in main memory that runs the kernels as C."""

import pytest
from cuda_stub import PARTS, TODAY

from mithril_testing import BackendConformance
from mithril_testing.devices import ON_HOST, DeviceConformance


@pytest.mark.soak
@pytest.mark.usefixtures("stub")
class TestCUDA(BackendConformance):
    backend = "cuda"
    on_host = ON_HOST
    joins = True


@pytest.mark.usefixtures("stub")
class TestDevice(DeviceConformance):
    device = "cuda"
    remedy = "install NVIDIA's driver"
    part, parts = TODAY, PARTS


@pytest.mark.soak
@pytest.mark.usefixtures("stub")
class TestDeviceWithEveryOperation(DeviceConformance):
    device = "cuda"
    remedy = "install NVIDIA's driver"
