"""The OpenCL backend on the conformance kit: first samples and programs, and the whole kit as a soak test."""

import pytest

from mithril_testing import BackendConformance
from mithril_testing.devices import ON_HOST, DeviceConformance


@pytest.mark.soak
class TestOpenCL(BackendConformance):
    backend = "opencl"
    on_host = ON_HOST
    joins = True


class TestDevice(DeviceConformance):
    device = "opencl"
    remedy = "mithril-opencl[cpu]"
