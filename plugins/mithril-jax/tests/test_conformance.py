"""The JAX backend on the whole conformance kit, jitted, since that is how programs run.

Thousands of programs run once each, so most are compiled quickly rather than well; those of special values by XLA's own
defaults, because it is the code generator that decides what becomes of nan, infinities and signed zeros.
"""

from __future__ import annotations

import pytest

import mithril as ml
from mithril.backend.base import BuildOptions
from mithril_testing import BackendConformance

QUICK = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_parallel_codegen_split_count": 1,
    "xla_cpu_use_fusion_emitters": False,
    "xla_llvm_disable_expensive_passes": True,
}
DEFAULTS = {  # whatever XLA_FLAGS says
    "xla_backend_optimization_level": 3,
    "xla_cpu_use_fusion_emitters": True,
    "xla_llvm_disable_expensive_passes": False,
}


class TestJax(BackendConformance):
    backend = "jax"
    configurations = (ml.JaxBackend(dtype="float64"),)
    jit = True
    joins = True
    compiler_options = QUICK

    @classmethod
    def options(cls):
        return BuildOptions(jit=True, jit_options={"compiler_options": cls.compiler_options})

    def test_special_values(self, op, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(type(self), "compiler_options", DEFAULTS)
        super().test_special_values(op)

    test_special_values.accepts = BackendConformance.test_special_values.accepts
