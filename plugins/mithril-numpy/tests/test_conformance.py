"""The NumPy backend on the whole conformance kit."""

from mithril_testing import BackendConformance


class TestNumpy(BackendConformance):
    backend = "numpy"
