"""Strict expected failures: each needs a reason, and one that passes is a failure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import pytest


def run(names: Iterable[str], xfail: Mapping[str, str], check: Callable[[], None]) -> None:
    """Run a check that may be expected to fail under one of its names."""
    expected = next((n for n in names if n in xfail), None)
    if expected is None:
        check()
        return
    reason = xfail[expected]
    if not isinstance(reason, str) or len(reason.split()) < 2:
        pytest.fail(f"xfail '{expected}' needs a reason in words")
    try:
        check()
    except Exception as error:
        pytest.xfail(f"{reason} ({type(error).__name__})")
    pytest.fail(f"xfail '{expected}' passes: remove it (its reason was: {reason})")
