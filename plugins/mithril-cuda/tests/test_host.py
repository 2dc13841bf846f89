"""The driver of a device: order of calls, memory that is returned, every failure as an error of mithril."""

import gc

import numpy as np
import pytest

import mithril as ml
from mithril import ops
from mithril.graph import Builder
from mithril.models import Linear, Relu, Sequential
from mithril_cbackend.devices.backend import DeviceBackend
from mithril_cuda import driver
from mithril_cuda.host import CUDAHost

ILLEGAL_ADDRESS = 700
LOST = "a driver that lost its device needs a new process; else compile with smaller shapes"


@pytest.fixture
def control(stub, monkeypatch):
    """Return the control of a driver without hosts."""
    monkeypatch.setattr(DeviceBackend, "hosts", {})
    gc.collect()
    stub.stub_reset()
    yield stub
    stub.stub_reset()
    stub.stub_set(1, 1 << 28)


def network(device="cuda"):
    model = Sequential(Linear(8), Relu(), Linear(3))
    return ml.compile(model, ml.CBackend(device=device), shapes={"input": [4, 5]}, inference=True)


def run(compiled):
    x = np.ones((4, 5), np.float32)
    return np.asarray(compiled.evaluate(compiled.randomize_params(seed=0), {"input": x})["output"])


def calls(control):
    return control.stub_calls().decode().split()


def live(control):
    return control.stub_live_memory(), control.stub_live_modules()


def test_order_of_calls(control):
    compiled = network()
    backend = compiled.backend
    array = backend.array(np.ones((4, 5), np.float32))
    params = compiled.randomize_params(seed=0)
    compiled.evaluate(params, {"input": array})
    control.stub_reset()
    result = compiled.evaluate(params, {"input": array})["output"]
    launches = len(compiled.programs[0].executable.program.launches)
    assert calls(control) == ["cuMemAllocAsync", *["cuLaunchKernel"] * launches]
    control.stub_reset()
    np.asarray(result)
    assert calls(control) == ["cuMemcpyDtoHAsync_v2", "cuStreamSynchronize"]
    control.stub_reset()
    backend.array(np.ones(3, np.float32))
    assert calls(control) == ["cuMemAllocAsync", "cuMemcpyHtoDAsync_v2", "cuStreamSynchronize", "cuMemFreeAsync"]


@pytest.mark.parametrize("pools", [True, False])
def test_memory_and_modules_are_released(control, pools):
    control.stub_set(pools, 1 << 28)
    backend = ml.CBackend(device="cuda")
    with Builder() as b:
        x, w = b.input("x", (4, 4)), b.constant(np.ones((4, 4), np.float32))
        y = ops.tanh(x @ w) @ w
    before = live(control)
    executable = backend.build(b.build({"y": y}))
    results = executable({}, {"x": np.ones((4, 4), np.float32)})
    assert live(control) == (before[0] + 3, before[1] + 1)  # the constant, a temporary, the result
    assert ("cuMemAllocAsync" in calls(control), "cuMemAlloc_v2" in calls(control)) == (pools, not pools)
    del executable
    np.testing.assert_allclose(np.asarray(results["y"]), np.full((4, 4), 4 * np.tanh(4.0)), rtol=1e-6)
    del results
    gc.collect()
    assert live(control) == before
    assert backend.host.allocated == 0


def test_the_second_device(control):
    backend = ml.CBackend(device="cuda:1")
    assert backend.host.label == "Stub 1 (compute capability 8.9, CUDA 12.9)"
    assert backend.host.capability == 89
    np.testing.assert_array_equal(np.asarray(backend.array(np.arange(3))), np.arange(3))


def test_more_memory_than_there_is(control):
    control.stub_set(1, 1 << 20)
    backend = ml.CBackend(device="cuda")
    array = backend.zeros((1 << 16,))
    with pytest.raises(ml.MemoryLimitError) as error:
        backend.zeros((1 << 18,))
    expected = (
        "the device 'Stub 0 (compute capability 8.0, CUDA 12.9)' has no room for an array of 1.05 MB\n"
        "  in use: 262 kB of 1.05 MB\n  largest array: 1.05 MB\n"
        "hint: compile with smaller shapes, or release arrays of the device that are no longer needed"
    )
    assert str(error.value) == expected
    # Other programs use the device as well.
    control.stub_fail(b"cuMemAllocAsync", driver.OUT_OF_MEMORY, 0)
    with pytest.raises(ml.MemoryLimitError, match="has no room for an array of 12 B"):
        backend.zeros((3,))
    assert backend.host.allocated == array.nbytes
    np.testing.assert_array_equal(np.asarray(backend.zeros((3,))), np.zeros(3))


@pytest.mark.parametrize(
    ("function", "action"),
    [
        ("cuDevicePrimaryCtxRetain", "open"),
        ("cuStreamCreate", "open"),
        ("cuMemPoolSetAttribute", "open"),
        ("cuDeviceTotalMem_v2", "open"),
        ("cuMemAllocAsync", "allocate memory"),
        ("cuMemcpyHtoDAsync_v2", "write to memory"),
        ("cuStreamSynchronize", "write to memory"),
        ("cuLaunchKernel", "run the kernel 'k0_"),
        ("cuMemcpyDtoHAsync_v2", "read from memory"),
    ],
)
def test_a_device_that_is_lost(control, function, action):
    control.stub_fail(function.encode(), ILLEGAL_ADDRESS, 1)
    with pytest.raises(ml.BackendError) as error:
        run(network())
    message, fact, hint = str(error.value).splitlines()
    assert message.startswith("the device '") and f"could not {action}" in message
    assert fact == f"  {function}: CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered"
    assert hint == f"hint: {LOST}"
    with pytest.raises(ml.BackendError):  # it stays lost; nothing hangs
        run(network())
    del error
    gc.collect()  # nor does the release of memory raise


@pytest.mark.parametrize("function", ["cuModuleLoadData", "cuModuleGetFunction"])
def test_code_that_the_driver_refuses(control, function):
    control.stub_fail(function.encode(), 999, 0)
    with pytest.raises(ml.BackendError) as error:
        run(network())
    message, fact, hint = str(error.value).splitlines()
    assert message.startswith("the CUDA driver of 'Stub 0 (compute capability 8.0, CUDA 12.9)' cannot compile ")
    assert fact == f"  {function}: 999: 999"
    assert hint == "hint: this is a bug in mithril or in the driver: please report it with str(compiled.graph)"
    run(network())


def test_a_missing_driver(monkeypatch):
    monkeypatch.setattr(DeviceBackend, "hosts", {})
    monkeypatch.setattr(driver, "LIBRARY", "libmissing.so.1")
    with pytest.raises(ml.BackendError) as error:
        ml.CBackend(device="cuda").zeros((2,))
    message, fact, hint = str(error.value).splitlines()
    assert message == "CUDA has no device 0"
    assert fact.startswith("  the driver cannot be used: libmissing.so.1: ")
    assert hint == "hint: install NVIDIA's driver; target_hardware='nvidia_a100' compiles without a GPU"
    assert ml.CUDABackend.diagnose() == {"devices": f"none: {fact.strip()}"}


def test_a_driver_without_devices(control, monkeypatch):
    control.stub_fail(b"cuDeviceGetCount", 100, 1)
    assert not CUDAHost.devices()
    with pytest.raises(ml.BackendError, match="CUDA has no device 0\n  the driver lists no device"):
        ml.CBackend(device="cuda").zeros((2,))


def test_compilation_for_a_gpu_that_is_absent(control, tmp_path):
    model = Sequential(Linear(8), Relu(), Linear(3))
    backend = ml.CBackend(device="cuda")
    shapes = {"input": [4, 5]}
    present = ml.compile(model, backend, shapes=shapes, inference=True, target_hardware="nvidia_a100")
    assert present.programs[0].executable.host is backend.host  # the stub is of its compute capability
    absent = ml.compile(model, backend, shapes=shapes, inference=True, target_hardware="h100")
    assert absent.source == present.source
    with pytest.raises(ml.BackendError) as error:
        absent.evaluate(present.randomize_params(seed=0), {"input": np.ones((4, 5), np.float32)})
    assert str(error.value) == (
        "the program is compiled for 'nvidia_h100', which is not on this machine\n"
        "hint: omit target_hardware to run it here; compiled.export('model.ptx', format='ptx') writes its kernels"
    )
    with pytest.raises(ml.BackendError, match="conflicts with the backend's device"):
        ml.compile(model, backend, shapes=shapes, target_hardware="tpu_v4")
