"""The C backend on the whole conformance kit."""

import pytest

import mithril as ml
from mithril_cbackend.graph.call_layout import RUN
from mithril_cbackend.tir import machine_code
from mithril_testing import BackendConformance

# factorizations by LAPACK, and bits of storage formats
ON_HOST = frozenset({"bitcast", "cholesky", "eigh", "qr", "slogdet", "solve", "svd", "triangular_solve"})


class TestC(BackendConformance):
    backend = "c"
    on_host = ON_HOST
    configurations = (ml.CBackend(num_threads=3),)
    distribution = "mithril-cbackend"

    @pytest.fixture(autouse=True)
    def _text_alone(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        """Skip machine code for tests that compare sources: it takes ten times as long."""
        if request.function.__name__ == "test_same_source_twice":
            monkeypatch.setattr(machine_code, "compiled", lambda *_: {RUN: None})
