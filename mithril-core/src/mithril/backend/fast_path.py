"""One Python function for a call that looks like the last one: its checks and what it runs, written out.

A loop over names, a method, a call in between: each takes as long as the arithmetic of a small model. So the function
is written for one program. It answers None unless it is given the very parameters, and inputs of the very kinds, that
were checked before. An executable may have a method ``quick(params, inputs, otherwise)`` that gives a better one;
``otherwise`` is the function for what that does not take.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from operator import is_
from typing import Any

Quick = Callable[[Any, Any], Any]
FEW = 8  # parameters: of more, a loop in C is faster than a comparison for each, and writes less


def never(params: Any, inputs: Any) -> None:
    """Before anything was checked."""


def quick(call: Any, params: Mapping[str, Any], inputs: Mapping[str, Any]) -> Quick:
    """The function for calls with these parameters and inputs like these, which ``call`` has taken."""
    made = written(params, inputs, ["return call(params, inputs)"], {"call": call})
    better = getattr(call, "quick", None)
    return made if better is None else better(params, inputs, made)


def written(
    params: Mapping[str, Any],
    inputs: Mapping[str, Any],
    lines: Sequence[str],
    names: Mapping[str, Any],
    *,
    kinds: bool = True,
) -> Quick:
    """A function that runs these lines if nothing has changed. They read ``names``, and the inputs as x0, x1, ...

    Without ``kinds`` it is left to the lines to look at what the inputs are.
    """
    read, differs, held = _parameters(params)
    differs.append(f"len(inputs) != {len(inputs)}")
    for k, (name, x) in enumerate(inputs.items()):
        read.append(f"x{k} = inputs[{name!r}]")
        if kinds:
            differs += [f"type(x{k}) is not kind{k}", f"x{k}.shape != shape{k}"]
            differs.append(f"(x{k}.dtype is not dtype{k} and x{k}.dtype != dtype{k})")
            held |= {f"kind{k}": type(x), f"shape{k}": x.shape, f"dtype{k}": x.dtype}
    checks = [
        *(["if params is not known:", "    return None"] if params else []),
        "try:",
        *(f"    {line}" for line in read),
        f"    if {' or '.join(differs)}:",
        "        return None",
        "except (AttributeError, KeyError, TypeError, IndexError, ValueError):",
        "    return None",
    ]
    held |= {"known": params, **names}
    made: Quick = _maker(", ".join(held), "\n        ".join([*checks, *lines]))(**held)
    return made


def _parameters(params: Mapping[str, Any]) -> tuple[list[str], list[str], dict[str, Any]]:
    """What reads parameters, when they are not the same any more, and what both look at."""
    values = tuple(params.values())
    if not values:
        return [], ["params"], {}
    if len(values) > FEW:
        differs = [f"len(params) != {len(values)}", "not all(map(is_, params.values(), values))"]
        return [], differs, {"is_": is_, "values": values}
    names = [f"p{k}" for k in range(len(values))]
    held = {f"value{k}": x for k, x in enumerate(values)}
    return [f"{', '.join(names)}, = params.values()"], [f"p{k} is not value{k}" for k in range(len(values))], held


@lru_cache(maxsize=256)  # programs of the same names share the code
def _maker(names: str, lines: str) -> Callable[..., Quick]:
    space: dict[str, Any] = {}
    exec(f"def maker({names}):\n    def quick(params, inputs):\n        {lines}\n    return quick\n", space)
    maker: Callable[..., Quick] = space["maker"]
    return maker
