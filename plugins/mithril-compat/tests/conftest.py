"""Paths of all tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # the helpers next to this file
