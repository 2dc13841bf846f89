"""Saves of several processes in the format of ``torch.distributed.checkpoint``; threads represent the processes."""

from __future__ import annotations

import numpy as np
import pytest
from test_processes import together, worlds

import mithril as ml
from mithril_parallel.processes import World
from mithril_parallel.sharding.checkpoint import Reader, begin_save
from mithril_parallel.sharding.tensor_parts import Part, PartedTensor

torch = pytest.importorskip("torch")
WEIGHT = np.arange(32, dtype=np.float32).reshape(8, 4)


def save(folder, world, value=WEIGHT, **options):
    """Save one half of the rows in each process."""
    rows = value[4 * world.rank : 4 * world.rank + 4]
    part = Part((4 * world.rank, 0), rows.shape, lambda: rows)
    tensor = PartedTensor("w", value.shape, value.dtype, [part])
    begin_save(folder, {"w": tensor}, {"steps": 3}, world, format="dcp", **options).finish()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_two_processes_write_one_checkpoint_that_torch_reads(tmp_path):
    results = together(lambda world: save(tmp_path, world, shared=True), worlds(timeout=60.0))
    assert results == [None, None]
    reader = Reader(tmp_path)
    assert reader.metadata == {"steps": 3}
    assert [part.size for part in reader.tensors["w"].parts] == [(4, 4), (4, 4)]
    np.testing.assert_array_equal(reader.tensors["w"].read((slice(2, 6), slice(1, 3))), WEIGHT[2:6, 1:3])
    state = {"w": torch.zeros(8, 4)}
    torch.distributed.checkpoint.load(state, checkpoint_id=tmp_path / reader.commit["library"], no_dist=True)
    np.testing.assert_array_equal(state["w"].numpy(), WEIGHT)


def test_process_that_dies_while_saving_leaves_the_previous_checkpoint(tmp_path):
    together(lambda world: save(tmp_path, world, shared=True), worlds(timeout=60.0))
    errors = together(
        lambda world: save(tmp_path, world, -WEIGHT, shared=True) if world.rank == 0 else world.from_first(None, "x"),
        worlds(timeout=1.0),
    )
    assert isinstance(errors[0], ml.BackendError)
    np.testing.assert_array_equal(Reader(tmp_path).tensors["w"].read(), WEIGHT)


def test_folders_of_single_nodes_are_refused(tmp_path):
    errors = together(lambda world: save(tmp_path, world, shared=False), worlds())
    assert all("needs a folder that all processes share" in str(error) for error in errors)


def test_object_stores_are_written_by_fsspec(tmp_path):
    pytest.importorskip("fsspec")
    begin_save("memory://dcp-format/run", {"w": WEIGHT}, {}, World(), format="dcp").finish()
    np.testing.assert_array_equal(Reader("memory://dcp-format/run").tensors["w"].read(), WEIGHT)
