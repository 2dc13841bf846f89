"""Names of gradients, states, reports, checks and cotangents. Code must rely on the roles of results instead."""

from __future__ import annotations

from collections.abc import Collection

from mithril.graph.core import Output, Value

PREFIXES = {"output": "", "gradient": "grad/", "state": "state/", "report": "report/", "check": "check/"}


def result_name(role: str, owner: str) -> str:
    """Return the default name of a result that belongs to an input, an output or a check."""
    return PREFIXES[role] + owner


def cotangent_name(output: str) -> str:
    """Return the default name of the input that holds the cotangent of an output."""
    return PREFIXES["gradient"] + output


def result(role: str, owner: str, value: Value) -> Output:
    """Return a value as a result of a role, under its default name."""
    return Output(value, result_name(role, owner), role, owner)


def named_before_roles(name: str, value: Value, states: Collection[str]) -> Output:
    """Return a result of old graph text without roles, in which the name marks the next value of a state."""
    state = name.removeprefix(PREFIXES["state"])
    return result("state", state, value) if state != name and state in states else Output(value, name)
