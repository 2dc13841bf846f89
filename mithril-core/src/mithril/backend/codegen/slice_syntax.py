"""Lowering of slices to Python's slice syntax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mithril.backend.codegen.call import Call


def sliced(call: Call, backwards: Callable[..., Any] | None = None) -> str:
    """Return ``x[2:5, :, ::3]`` for a node ``slice``, and ``backwards(x, axis, start, stop, step)`` for negative steps.

    Without ``backwards``, the arrays must support negative steps.
    """
    text = call.array("x")
    parts = [":"] * len(call.operand_type("x").shape)
    for start, stop, step, axis in zip(call.starts, call.stops, call.steps, call.axes, strict=True):
        ends = call.literal(start), call.literal(stop)
        if step < 0 and backwards is not None:
            text = f"{call.helper(backwards)}({text}, {axis}, {ends[0]}, {ends[1]}, {step})"
        else:
            parts[axis] = ":".join(ends) + (f":{step}" if step != 1 else "")
    return f"{text}[{', '.join(parts)}]" if any(p != ":" for p in parts) else text
