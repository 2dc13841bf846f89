from mithril.testing import BackendConformance


class TestTorch(BackendConformance):
    backend = "torch"
