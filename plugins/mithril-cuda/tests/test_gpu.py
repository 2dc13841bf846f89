"""The same cases on a real GPU."""

import pytest

from mithril_cuda.host import CUDAHost
from mithril_testing import BackendConformance
from mithril_testing.devices import ON_HOST, DeviceConformance

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not CUDAHost.devices(), reason=CUDAHost.absence())]


class TestGPU(DeviceConformance):
    device = "cuda"
    remedy = "install NVIDIA's driver"


@pytest.mark.soak
class TestGPUOnTheKit(BackendConformance):
    backend = "cuda"
    on_host = ON_HOST
    joins = True
