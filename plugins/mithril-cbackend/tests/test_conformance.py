"""The C backend on the whole conformance kit."""

import pytest

import mithril as ml
from mithril_cbackend.graph.call_layout import RUN, Layout
from mithril_cbackend.tir import machine_code
from mithril_testing import BackendConformance

# factorizations by LAPACK, and bits of storage formats
ON_HOST = frozenset({"bitcast", "cholesky", "eigh", "qr", "slogdet", "solve", "svd", "triangular_solve"})


class TestC(BackendConformance):
    backend = "c"
    on_host = ON_HOST
    configurations = (ml.CBackend(num_threads=3),)
    distribution = "mithril-cbackend"
    joins = True

    @pytest.fixture(autouse=True)
    def _called_code_alone(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        """Skip machine code that is not called: of tests that compare sources, and of the second entry point."""
        if request.function.__name__ == "test_same_source_twice":
            monkeypatch.setattr(machine_code, "compiled", lambda *_: {RUN: None})
        if {"case", "op"} & set(request.fixturenames):  # programs that are called by ``run`` alone
            monkeypatch.setattr(Layout, "callable", False)
