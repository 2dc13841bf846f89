"""The elementary functions keep the limits that ``docs/semantics.md`` states, on every backend installed."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from mithril import plugins
from mithril.graph import dtype as as_dtype

mpmath = pytest.importorskip("mpmath")
ROOT = Path(__file__).parents[1]
spec = importlib.util.spec_from_file_location("bench_accuracy", ROOT / "benchmarks" / "bench_accuracy.py")
accuracy = importlib.util.module_from_spec(spec)
spec.loader.exec_module(accuracy)


def stated():
    """Return the limits of the page by backend and function."""
    page = (ROOT / "docs" / "semantics.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.+?) \| (\w+) \| (\d+) ulp", page, re.M)
    return {(kind, name): float(limit) for names, kind, limit in rows for name in re.findall(r"`(\w+)`", names)}


LIMITS = stated()


@pytest.mark.parametrize("kind", ["float32", "float64"])
@pytest.mark.parametrize("name", sorted(plugins.backends()))
def test_errors_are_within_the_stated_limits(name, kind):
    backend = plugins.backend_class(name)()
    if as_dtype(kind) not in backend.dtypes:
        pytest.skip(f"{name} has no {kind}")
    measured = accuracy.errors(backend, as_dtype(kind), 60)
    over = {
        function: (error, x)
        for function, (error, x) in measured.items()
        if error > max(LIMITS.get((every, function), 0) for every in ("every", name)) and error > 4
    }
    assert not over


def test_the_page_states_known_functions():
    assert {name for _, name in LIMITS} <= set(accuracy.EXACT)
    assert {kind for kind, _ in LIMITS} <= {"every", *plugins.backends()}


@pytest.mark.parametrize(("value", "true", "error"), [(1.0, 1, 0), (1 + 2**-22, 1, 2), (float("nan"), 1, float("inf"))])
def test_the_error_is_in_units_of_the_last_place(value, true, error):
    assert accuracy.error(value, mpmath.mpf(true), as_dtype("float32")) == error
