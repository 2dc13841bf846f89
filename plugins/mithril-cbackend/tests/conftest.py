"""Helpers that several test files import."""

import sys
from pathlib import Path

import pytest

from mithril_cbackend.graph.call_layout import Layout

sys.path.insert(0, str(Path(__file__).parent))
CALLED_ONCE = {  # files whose programs are called by ``run`` alone
    "test_attention",
    "test_byte_images",
    "test_constant_kernels",
    "test_convolution_gradients",
    "test_reductions",
    "test_schedules",
    "test_winograd",
    "test_words",
}


@pytest.fixture(autouse=True)
def _one_entry_point(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the machine code of ``call``, which takes up to a sixth of the compilation, where it is not called."""
    if request.path.stem in CALLED_ONCE:
        monkeypatch.setattr(Layout, "callable", False)
