"""Names of gradients, states, reports, checks and cotangents. Nothing reads them: roles say what a result is."""

from __future__ import annotations

from collections.abc import Collection

from mithril.ir.core import Output, Value

PREFIXES = {"output": "", "gradient": "grad/", "state": "state/", "report": "report/", "check": "check/"}


def result_name(role: str, owner: str) -> str:
    """Return the usual name of a result that belongs to an input, an output or a check."""
    return PREFIXES[role] + owner


def cotangent_name(output: str) -> str:
    """Return the usual name of the input that holds the cotangent of an output."""
    return PREFIXES["gradient"] + output


def result(role: str, owner: str, value: Value) -> Output:
    """Return a value as a result of some role, under its usual name."""
    return Output(value, result_name(role, owner), role, owner)


def named_before_roles(name: str, value: Value, states: Collection[str]) -> Output:
    """Return a result of a graph text without roles, in which only the name tells the next value of a state."""
    state = name.removeprefix(PREFIXES["state"])
    return result("state", state, value) if state != name and state in states else Output(value, name)
