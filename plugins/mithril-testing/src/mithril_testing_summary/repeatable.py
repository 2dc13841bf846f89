"""The same random numbers in every run and order of tests: ``-p mithril_testing_summary.repeatable``."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from hypothesis import settings

# The test command accepts or rejects changes: its examples are the same on every run. `nox -s soak` draws others.
settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def _seeded_generators(request: pytest.FixtureRequest) -> None:
    """Reseed the generators of the test's module: their numbers would depend on the tests that ran before."""
    seed = zlib.crc32(request.node.nodeid.encode())
    for value in vars(request.module).values():
        if isinstance(value, np.random.Generator):
            value.bit_generator.state = type(value.bit_generator)(seed).state
