"""``@ml.op`` without parentheses explains what is missing."""

from __future__ import annotations

import pytest

import mithril as ml


def test_a_bare_op_names_the_rules_to_write():
    with pytest.raises(ml.OperationError, match="@op of 'cube' needs a shape rule and a dtype rule") as caught:

        @ml.op
        def cube(x):
            """x to the power of three."""
            return x**3

    assert "test_bare_op.py" in caught.value.facts[0]
    assert "@op(shape=broadcast, dtype=floating)" in caught.value.hint
