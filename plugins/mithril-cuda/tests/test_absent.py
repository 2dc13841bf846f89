"""Programs for GPUs that are absent: memory, assembly, targets without a compute capability."""

import pytest

import mithril as ml
from mithril import HardwareTarget
from mithril.models import Linear, Relu, Sequential
from mithril.plugins import targets
from mithril_cuda.absent import AbsentHost


def compiled_for(target):
    model = Sequential(Linear(8), Relu(), Linear(3))
    return ml.compile(model, "cuda", shapes={"input": [4, 5]}, inference=True, target_hardware=target)


@pytest.mark.parametrize(("target", "capability"), [("nvidia_a100", 80), ("h100", 90), ("rtx4090", 89)])
def test_assembly_for_a_target(tmp_path, target, capability):
    path = compiled_for(target).export(tmp_path / "model.ptx", format="ptx").path
    text = path.read_text()
    assert f".target sm_{capability}\n" in text
    assert ".visible .entry k0_" in text


def test_more_memory_than_a_target_has():
    host = AbsentHost(targets()["nvidia_rtx4090"].spec)
    buffer = host.allocate(20 << 30)
    with pytest.raises(ml.MemoryLimitError, match="the device 'nvidia_rtx4090' has no room for an array of 8.59 GB"):
        host.allocate(8 << 30)
    del buffer
    host.allocate(8 << 30)


def test_every_gpu_of_the_catalog_has_a_compute_capability():
    gpus = [entry.spec for entry in targets().values() if entry.spec.family == "nvidia"]
    assert len(gpus) >= 7
    assert all(AbsentHost(spec).capability >= 80 for spec in gpus)


def test_a_target_without_a_compute_capability():
    with pytest.raises(ml.BackendError) as error:
        AbsentHost(HardwareTarget("new_gpu", "nvidia"))
    assert str(error.value) == (
        "cannot compile for 'new_gpu': its compute capability is not known\n"
        "hint: set costs={'capability': 8.0} of the HardwareTarget"
    )
