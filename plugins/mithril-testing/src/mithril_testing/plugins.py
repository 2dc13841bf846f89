"""Conformance of hardware targets and profilers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from mithril import plugins
from mithril.graph import dtype as as_dtype
from mithril.plugins import HardwareTarget


class TargetConformance:
    """Inherit and set ``target`` to a name or a ``HardwareTarget``."""

    target: ClassVar[str | HardwareTarget] = ""

    def found(self) -> HardwareTarget:
        selection = self.target
        return plugins.target(selection).spec if isinstance(selection, str) else selection

    def test_rates_are_physical(self) -> None:
        """Rates and memory are positive; every dtype with a rate exists."""
        target = self.found()
        for name, rate in target.peak_flops.items():
            as_dtype(name)
            assert 1e8 < rate < 1e19, f"{name}: {rate:g} operations per second is not believable"
        assert target.bandwidth is None or 1e8 < target.bandwidth < 1e14
        assert target.memory is None or target.memory > 1 << 16

    def test_dtypes_exist(self) -> None:
        for name in self.found().dtypes:
            as_dtype(name)

    def test_narrower_floats_are_not_slower(self) -> None:
        """Halving the width never lowers the peak rate on hardware that lists both."""
        rates = self.found().peak_flops
        for wider, narrow in (("float64", "float32"), ("float32", "float16"), ("float32", "bfloat16")):
            if wider in rates and narrow in rates:
                assert rates[narrow] >= rates[wider], f"{narrow} is slower than {wider}"

    def test_aliases_lead_here(self) -> None:
        target = self.found()
        if isinstance(self.target, str):
            for alias in target.aliases:
                assert plugins.target(alias).spec == target


class ProfilerConformance:
    """Inherit and set ``profiler`` to a name; it is a context manager whose ``summary()`` is text."""

    profiler: ClassVar[str] = ""
    arguments: ClassVar[Mapping[str, Any]] = {}

    def test_measures_a_block(self) -> None:
        profiler = plugins.load_profiler(self.profiler)(**self.arguments)
        with profiler as running:
            total = sum(range(1000))
        assert total == 499500
        assert isinstance(running.summary(), str)
        assert running.summary()

    def test_can_be_used_twice(self) -> None:
        kind = plugins.load_profiler(self.profiler)
        for _ in range(2):
            with kind(**self.arguments):
                pass
