"""The C backend on the whole conformance kit."""

from mithril.testing import BackendConformance


class TestC(BackendConformance):
    backend = "c"
    distribution = "mithril-cbackend"
