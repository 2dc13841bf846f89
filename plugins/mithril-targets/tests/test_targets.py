"""Every hardware target on the conformance kit; aliases, detection, and contradictions with a backend's device."""

from __future__ import annotations

import time

import pytest

import mithril as ml
from mithril import plugins
from mithril.plugins import MemoryLevel
from mithril_targets import catalog, cpu, mobile, nvidia, tpu
from mithril_testing import TargetConformance

NAMES = [t.name for t in catalog.all_targets()]


@pytest.mark.parametrize("name", NAMES)
class TestTargets(TargetConformance):
    @pytest.fixture(autouse=True)
    def _choose(self, name):
        self.target = name

    def test_is_complete(self):
        """Every figure that plans and memory checks use is present."""
        targets = self.found()
        assert targets.bandwidth
        assert targets.memory
        assert targets.summary
        assert 0 < targets.costs["efficiency"] <= 1
        assert targets.costs.get("usable_memory", targets.memory) <= targets.memory
        assert set(targets.peak_flops) <= set(targets.dtypes)


def test_the_families_are_those_that_backends_name():
    assert {t.family for t in catalog.all_targets()} == {"cpu", "tpu", "nvidia", "apple", "mobile"}


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("tpu7x", "tpu_v7x"),
        ("tpu_trillium", "tpu_v6e"),
        ("a100", "nvidia_a100"),
        ("h200", "nvidia_h200"),
        ("m1_pro", "apple_m1_pro"),
        ("arm64-v8a", "mobile_arm64"),
        ("mobile", "mobile_arm64"),
        ("host", "cpu"),
    ],
)
def test_aliases(alias, name):
    assert plugins.target(alias).spec.name == name


def test_an_unknown_target_names_the_nearest():
    with pytest.raises(ml.PluginError, match="did you mean 'tpu_v5'"):
        plugins.target("tpu_v5x")


# ------------------------------------------------------------------------------------------------------- detection
def test_the_processor_is_always_found():
    detected = plugins.detect_targets()
    assert "cpu" in [f.spec.name for f in detected]
    assert all(plugins.target(f.spec.name) for f in detected)


def test_detected_cpu_figures_are_plausible():
    seen = cpu.processor()
    assert seen.cores >= 1
    assert 5e8 < seen.clock < 1e10
    assert seen.memory is None or seen.memory > 1 << 28


def test_caches_are_levels_of_the_cpu(tmp_path, monkeypatch):
    for k, (level, kind, size) in enumerate([(1, "Data", "48K"), (1, "Instruction", "32K"), (2, "Unified", "2M")]):
        (tmp_path / f"index{k}").mkdir()
        for name, text in {"level": level, "type": kind, "size": size}.items():
            (tmp_path / f"index{k}" / name).write_text(f"{text}\n")
    (tmp_path / "index3").mkdir()  # a level that the system does not describe
    monkeypatch.setattr(cpu, "CACHES", tmp_path)
    assert cpu.levels() == (MemoryLevel("L1", 48 << 10), MemoryLevel("L2", 2 << 20))


def test_detection_is_quick():
    start = time.process_time()
    catalog.detected()
    catalog.all_targets()
    assert time.process_time() - start < 0.5


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "nvidia_a100"),
        ("NVIDIA A100-SXM4-40GB", "nvidia_a100_40gb"),
        ("NVIDIA H100 80GB HBM3", "nvidia_h100"),
        ("NVIDIA H100 PCIe", "nvidia_h100_pcie"),
        ("NVIDIA H200", "nvidia_h200"),
        ("NVIDIA B200", "nvidia_b200"),
        ("NVIDIA GeForce RTX 4090", "nvidia_rtx4090"),
        ("NVIDIA GeForce RTX 3060", None),
    ],
)
def test_names_of_gpus(model, name):
    assert nvidia.target_of(model) == name


def test_names_of_tpu_devices():
    assert tpu.of_device("TPU v5 lite").name == "tpu_v5e"
    assert tpu.of_device("TPU v4").name == "tpu_v4"
    assert tpu.of_device("cpu") is None


def test_android_is_recognized(monkeypatch):
    monkeypatch.setenv("ANDROID_ROOT", "/system")
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert [f.name for f in mobile.detect()] == ["mobile_arm64"]


def test_a_container_limits_cores(monkeypatch):
    monkeypatch.setattr(cpu, "read", lambda path: "100000 100000" if "cpu.max" in str(path) else None)
    assert cpu._cores() == 1


# ---------------------------------------------------------------------------------------------------- contradictions
def test_a_target_that_contradicts_the_device_names_both():
    model = ml.Model()
    model |= ml.models.Linear(4)(input="x", output="y")
    with pytest.raises(ml.BackendError, match="tpu_v5e") as caught:
        ml.compile(model, "numpy", target_hardware="tpu_v5e")
    assert "cpu" in str(caught.value)


def test_the_processor_is_a_target_of_a_cpu_backend():
    model = ml.Model()
    model |= ml.models.Linear(4)(input="x", output="y")
    ml.compile(model, "numpy", target_hardware="cpu")
