"""Cases of ``test_parallel``: decoders of mithril-hub whose experts are divided over the processes."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch.distributed as dist
from mesh_cases import changes

import mithril as ml

sys.path.insert(0, str(Path(__file__).parents[2] / "mithril-hub" / "tests"))


def checkpoint(_size):
    """Return the Mixtral of a checkpoint, which each process writes for itself."""
    from checkpoints import folder_of, read_record

    vocabulary = read_record("mixtral")["config"]["vocab_size"]
    tokens, targets = np.random.default_rng(0).integers(0, vocabulary, (2, 4, 6)).astype(np.int32)
    folder = folder_of("mixtral", Path(tempfile.mkdtemp()))
    model = ml.from_pretrained(folder, stack_experts=True)
    return model, {"input_ids": tokens, "target": targets}, "cross_entropy"


def experts_of_a_checkpoint():
    """Compare gradients with one process."""
    expected = changes(checkpoint, "small", None)
    assert any(value.ndim == 3 for name, value in expected.items() if "experts.w1" in name)
    actual = changes(checkpoint, "small", (dist.get_world_size(),), parallelism="expert")
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        error = np.abs(np.asarray(actual[name], np.float64) - value).max()
        assert error <= 3e-6 * max(1.0, np.abs(value).max()), (name, error)
