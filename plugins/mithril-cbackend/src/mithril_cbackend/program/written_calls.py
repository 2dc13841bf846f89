"""Generated Python function for repeated calls of a program: unrolled checks and the call of the machine code.

A loop over names, a method or an extra call takes as long as the arithmetic of a small model, so the function is
generated for one program. It forwards calls with other parameters to the function ``otherwise``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from operator import is_
from typing import Any

Repeated = Callable[[Any, Any], Any]
FEW = 8  # parameters; for more, a loop in C is faster than generated comparisons


def written(
    params: Mapping[str, Any],
    inputs: Mapping[str, Any],
    lines: Sequence[str],
    names: Mapping[str, Any],
) -> Repeated:
    """Build a function that runs `lines` for the same parameters and for inputs of the same names.

    The lines use ``names`` and the inputs x0, x1, ..., whose types they must check themselves.
    """
    read, differs, bindings = _parameters(params)
    differs.append(f"len(inputs) != {len(inputs)}")
    for k, name in enumerate(inputs):
        read.append(f"x{k} = inputs[{name!r}]")
    checks = [
        "if params is not known:",
        "    return otherwise(params, inputs)",
        "try:",
        *(f"    {line}" for line in read),
        f"    if {' or '.join(differs)}:",
        "        return otherwise(params, inputs)",
        "except (AttributeError, KeyError, TypeError, IndexError, ValueError):",
        "    return otherwise(params, inputs)",
    ]
    bindings |= {"known": params, **names}
    function: Repeated = _maker(", ".join(bindings), "\n        ".join([*checks, *lines]))(**bindings)
    return function


def _parameters(params: Mapping[str, Any]) -> tuple[list[str], list[str], dict[str, Any]]:
    """Return lines that read the parameters, conditions for their change, and the objects that both use."""
    values = tuple(params.values())
    if not values:
        return [], ["params"], {}
    if len(values) > FEW:
        differs = [f"len(params) != {len(values)}", "not all(map(is_, params.values(), values))"]
        return [], differs, {"is_": is_, "values": values}
    names = [f"p{k}" for k in range(len(values))]
    bindings = {f"value{k}": x for k, x in enumerate(values)}
    return [f"{', '.join(names)}, = params.values()"], [f"p{k} is not value{k}" for k in range(len(values))], bindings


@lru_cache(maxsize=256)  # programs of the same names share the code
def _maker(names: str, lines: str) -> Callable[..., Repeated]:
    space: dict[str, Any] = {}
    exec(f"def maker({names}):\n    def call(params, inputs):\n        {lines}\n    return call\n", space)
    maker: Callable[..., Repeated] = space["maker"]
    return maker
