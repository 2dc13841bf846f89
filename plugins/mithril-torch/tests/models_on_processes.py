"""Small models, trained in four processes in every way of PyTorch: the largest difference to one process.

``python plugins/mithril-torch/tests/models_on_processes.py`` prints a table of docs/many-devices.md; with names of
models only their rows.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    root = Path(__file__).parents[3]
    sys.path[:0] = [str(root / "examples"), str(root / "plugins" / "mithril-parallel" / "tests")]

from trained_models import Way, combinations, difference, limit, of_today, print_table

import mithril as ml

WAYS: dict[str, Way] = {
    "data": ((4,), {}),
    "model": ((2, 2), {}),
    "fsdp": ((4,), {"parallelism": "fsdp"}),
    "hsdp": ((2, 2), {"parallelism": "hsdp"}),
    "sequence": ((2, 2), {"parallelism": "sequence"}),
    "context": ((2, 2), {"parallelism": "context"}),
    "expert": ((4,), {"parallelism": "expert"}),
    "pipeline": ((2, 1, 2), {}),
}


def one_of_them():
    """Compare the combination of today with one process."""
    compare([of_today(combinations(WAYS))])


def all_of_them():
    """Compare every combination with one process."""
    compare(combinations(WAYS))


def compare(pairs):
    changes = {(model, way): difference(model, ml.TorchBackend, WAYS[way]) for model, way in pairs}
    wrong = {(model, way): x for (model, way), x in changes.items() if x >= limit(model)}
    assert not wrong, wrong


if __name__ == "__main__":
    print_table(ml.TorchBackend, WAYS, sys.argv[1:])
