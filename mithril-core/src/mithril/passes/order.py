"""Order of passes in a pipeline, and the text form of pipelines."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from mithril.graph import STAGES, PassError, parse_attributes
from mithril.passes.declare import Pass, as_pass, pass_text

_ITEM = re.compile(r"\s*([\w.\-]+)\s*(?:\{([^{}]*)\})?\s*(?:,|$)")


def pipeline_text(passes: Iterable[Pass]) -> str:
    """Return passes as text, from which ``parse_pipeline`` reads them."""
    return ", ".join(map(pass_text, passes))


def parse_pipeline(text: str, lookup: Callable[[str], Any]) -> list[Pass]:
    """Parse the output of ``pipeline_text``; ``lookup`` returns the function or class with a name."""
    out, position = [], 0
    while position < len(text):
        match = _ITEM.match(text, position)
        if not match or match.end() == position:
            raise PassError(
                f"cannot read the pipeline at '{text[position : position + 30].strip()}'",
                hint="write it as: a, b{option=1}, c",
            )
        implementation = lookup(match[1])
        if match[2]:
            options = parse_attributes(re.sub(r"([\w\-]+)=", lambda m: m[1].replace("-", "_") + "=", match[2]), {})
            try:
                implementation = implementation(**options)
            except TypeError as error:
                raise PassError(f"pass '{match[1]}' does not take these options: {error}") from None
        out.append(as_pass(implementation, name=match[1]))
        position = match.end()
    return out


def sort_passes(passes: Sequence[Pass]) -> list[Pass]:
    """Sort passes by stage, then by ``before`` and ``after``, otherwise in the original order."""
    names = [p.name for p in passes]
    if len(set(names)) != len(names):
        twice = next(n for n in names if names.count(n) > 1)
        raise PassError(f"pass '{twice}' occurs twice", hint="pass another name= for one of them")
    stages = {p.name: p.stage for p in passes}
    for p in passes:
        for name in (*p.before, *p.after):
            if stages.get(name, p.stage) != p.stage:
                raise PassError(
                    f"pass '{p.name}' names '{name}' in before= or after=, which runs in stage '{stages[name]}'",
                    facts=[f"'{p.name}' runs in stage '{p.stage}'", f"stages, in order: {', '.join(STAGES)}"],
                    hint="before= and after= order passes of one stage; choose another stage= instead",
                )
    by_stage: dict[str, list[Pass]] = {}
    for p in passes:
        by_stage.setdefault(p.stage, []).append(p)
    return [p for stage in STAGES if stage in by_stage for p in _sorted(by_stage[stage])]


def _sorted(passes: list[Pass]) -> list[Pass]:
    by_name = {p.name: p for p in passes}
    earlier = {p.name: [n for n in p.after if n in by_name] for p in passes}
    for p in passes:
        for name in p.before:
            if name in by_name:
                earlier[name].append(p.name)
    out: list[Pass] = []
    done: set[str] = set()
    waiting = list(by_name)
    while waiting:
        ready = next((n for n in waiting if all(e in done for e in earlier[n])), None)
        if ready is None:
            cycle = _cycle(earlier, waiting)
            raise PassError(
                "cyclic order of passes: " + " -> ".join(cycle),
                facts=[_placement_line(by_name[name]) for name in dict.fromkeys(cycle)],
                hint=f"disable one of them: optimizations={{'{cycle[0]}': False}}",
            )
        waiting.remove(ready)
        done.add(ready)
        out.append(by_name[ready])
    return out


def _placement_line(one: Pass) -> str:
    """Return one line of a cycle: the pass, its distribution, and its placement."""
    words = [f"{field}={', '.join(getattr(one, field))}" for field in ("before", "after") if getattr(one, field)]
    return f"'{one.name}'" + (f" of {one.origin}" if one.origin else "") + f": {'; '.join(words) or 'no placement'}"


def _cycle(earlier: Mapping[str, list[str]], waiting: list[str]) -> list[str]:
    path = [waiting[0]]
    while True:
        following = next(n for n in earlier[path[-1]] if n in waiting)
        if following in path:
            return [*path[path.index(following) :], following][::-1]
        path.append(following)
