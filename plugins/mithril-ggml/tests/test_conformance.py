"""The GGML backend on the whole conformance kit."""

from mithril_testing import BackendConformance


class TestGGML(BackendConformance):
    backend = "ggml"
