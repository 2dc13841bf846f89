"""Compiled kernels of the tests stay out of the user's cache of tinygrad."""

import os
import tempfile

_folder = tempfile.TemporaryDirectory()
os.environ["CACHEDB"] = f"{_folder.name}/kernels.db"
