"""The PyTorch backend on the whole conformance kit."""

import mithril as ml
from mithril_testing import BackendConformance


class TestTorch(BackendConformance):
    backend = "torch"
    configurations = (ml.TorchBackend(enable_amp=True), ml.TorchBackend(device_mesh=(2,)))
