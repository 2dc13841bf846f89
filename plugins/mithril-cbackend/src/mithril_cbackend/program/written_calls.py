"""One Python function for a call that is like the last one: its checks and the call of the compiled code, written out.

A loop over names, a method, a call in between: each takes as long as the arithmetic of a small model. So the function
is written for one program. It hands all but the very parameters that were checked before to the function ``otherwise``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from operator import is_
from typing import Any

Repeated = Callable[[Any, Any], Any]
FEW = 8  # parameters: of more, a loop in C is faster than a comparison for each, and writes less


def written(
    params: Mapping[str, Any],
    inputs: Mapping[str, Any],
    lines: Sequence[str],
    names: Mapping[str, Any],
) -> Repeated:
    """Return a function that runs these lines for the same parameters and inputs of the same names.

    The lines read ``names``, and the inputs as x0, x1, ..., whose kinds they check themselves.
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
    """Return lines that read parameters, conditions of their change, and the objects that both use."""
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
