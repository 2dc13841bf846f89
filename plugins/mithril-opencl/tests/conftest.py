"""Tests need a driver whose compiler knows this CPU; PoCL 3.0 of mithril-opencl[cpu] knows those of its time."""

from pathlib import Path

import pyopencl as cl
import pytest

from mithril_opencl.host import UNKNOWN_CPU, OpenCLHost

FOLDER = Path(__file__).parent


def compiles_for_this_cpu():
    devices = OpenCLHost.devices()
    try:
        if devices:
            cl.Program(cl.Context(devices[:1]), "__kernel void set(__global float *x) { x[0] = 1.0f; }").build()
    except cl.Error as error:
        return UNKNOWN_CPU not in str(error)
    return True  # without a driver the tests fail


def pytest_collection_modifyitems(items):
    # The hook sees the tests of all folders of a run.
    device_tests = [item for item in items if item.path.is_relative_to(FOLDER)]
    if device_tests and not compiles_for_this_cpu():
        for item in device_tests:
            item.add_marker(pytest.mark.skip(reason="the OpenCL driver is older than this CPU"))
