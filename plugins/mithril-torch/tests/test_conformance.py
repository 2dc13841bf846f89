"""The PyTorch backend on the whole conformance kit."""

from mithril_testing import BackendConformance


class TestTorch(BackendConformance):
    backend = "torch"
