"""``to_module()`` on many devices: each composition with PyTorch has the gradients of one device."""

from __future__ import annotations

import pytest
from processes import run_cases

pytest.importorskip("mithril_parallel", reason="splits are chosen by mithril-parallel")
CASES = {
    2: (
        "fully_sharded",
        "data_parallel",
        "tensor_parallel",
        "compiled_blocks",
        "compiled_tensor_parallel",
        "gradients_of_16_bits_travel_as_16_bits",
        "checkpoints",
        "pipelines",
        "state_of_local_rows_is_refused",
    ),
    4: ("fully_sharded", "replicated_shards", "tensor_parallel", "two_dimensions"),
}


@pytest.mark.parametrize("count", CASES)
def test_cases_in_processes(count, tmp_path):
    errors = run_cases("module_cases", CASES[count], count, tmp_path)
    assert not any(errors.values()), "\n".join(f"-- {name} --\n{error}" for name, error in errors.items() if error)
