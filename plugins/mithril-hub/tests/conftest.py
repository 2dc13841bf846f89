"""Fixtures of all tests."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the helpers next to this file


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Return a function from families to folders of their small checkpoints."""
    from checkpoints import folder_of

    root = tmp_path_factory.mktemp("checkpoints")
    return lambda family: folder_of(family, root)
