"""Search paths of the models that several tests compile."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "mithril-parallel" / "tests"))  # trained_models
sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
