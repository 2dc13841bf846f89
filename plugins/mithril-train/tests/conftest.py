"""Makes the folder importable, so that spawned workers find the datasets of the tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
