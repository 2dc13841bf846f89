"""Small models, trained on every kind of mesh of JAX: the largest difference to one device.

``python plugins/mithril-tpu/tests/models_on_meshes.py`` prints a table of docs/many-devices.md; with names of models
only their rows.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    os.environ.update(JAX_NUM_CPU_DEVICES="4", JAX_PLATFORMS="cpu", NPROC="16")
    root = Path(__file__).parents[3]
    sys.path[:0] = [str(root / "examples"), str(root / "plugins" / "mithril-parallel" / "tests")]

from trained_models import Way, print_table

import mithril as ml

WAYS: dict[str, Way] = {
    "data": ((4,), {}),
    "model": ((2, 2), {}),
    "fsdp": ((4,), {"parallelism": "fsdp"}),
    "hsdp": ((2, 2), {"parallelism": "hsdp"}),
    "sequence": ((2, 2), {"parallelism": "sequence"}),
    "context": ((2, 2), {"parallelism": "context"}),
    "expert": ((4,), {"parallelism": "expert"}),
    "pipeline": ((1, 1, 2), {}),
}

if __name__ == "__main__":
    print_table(ml.JaxBackend, WAYS, sys.argv[1:])
