"""Which passes run: the level's, switched by ``optimizations=``, joined by ``custom_passes=``, amended by plugins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mithril import plugins
from mithril.errors import OptionError, unknown
from mithril.hookspecs import CompileContext, PipelineDraft
from mithril.passes import LEVELS, Pass, PassManager, as_pass

CHECKS = {"none": "none", "structure": "structure", "numeric": "numeric"}


def optimization_level(settings: Mapping[str, Any]) -> str:
    """The level in force: ``graph_optimization=True`` means medium at least."""
    level: str = settings["optimization_level"]
    if settings["graph_optimization"] and LEVELS.index(level) < LEVELS.index("medium"):
        return "medium"
    return level


def make_pipeline(settings: Mapping[str, Any], context: CompileContext) -> PassManager:
    """The passes of one compilation, in order."""
    passes = [installed(p) if isinstance(p, str) else custom(p) for p in chosen(settings, context)]
    return PassManager(_distinct(passes), check=CHECKS[settings["verify"]])


def chosen(settings: Mapping[str, Any], context: CompileContext) -> list[Any]:
    """The passes of one compilation by name, the user's own as they are; nothing is imported, names are checked."""
    names = level_passes(context.level)
    names += [n for n in dict.fromkeys((*context.backend.passes, *asked_for(settings))) if n not in names]
    for name, wanted in switches(settings["optimizations"]).items():
        if wanted and name not in names:
            names.append(name)
        elif not wanted and name in names:
            names.remove(name)
    draft = plugins.amend_pipeline(PipelineDraft(names), context.target, context.level)
    names = [draft.replaced.get(n, n) for n in names if n not in draft.removed]
    names += [n for n in draft.added if n not in names]
    passes = [*names, *settings["custom_passes"]]
    for one in passes:
        if isinstance(one, str):
            plugins.pass_spec(one)
        else:
            custom(one)
    return passes


def level_passes(level: str) -> list[str]:
    """Names of the installed passes that a level includes."""
    rank = LEVELS.index(level)
    return sorted(
        name for name, found in plugins.passes().items() if found.spec.level and LEVELS.index(found.spec.level) <= rank
    )


def asked_for(settings: Mapping[str, Any]) -> list[str]:
    """Names of the installed passes whose own option is set."""
    names = set()
    for name, found in plugins.passes().items():
        for option in found.spec.options:  # all of them are read, so that none counts as ignored
            if settings[option]:
                names.add(name)
    return sorted(names)


def switches(given: Mapping[str, bool]) -> dict[str, bool]:
    """``optimizations={...}`` with aliases resolved; unknown names and contradictions are errors."""
    names, aliases = plugins.passes(), plugins.pass_aliases()
    out: dict[str, bool] = {}
    for word, wanted in given.items():
        name = aliases.get(word, word)
        if name not in names:
            known = [*names, *aliases]
            what, facts, hint = unknown("optimization", word, known)
            raise OptionError(
                what,
                facts=facts,
                hint=hint or (None if known else "pip install mithril-passes brings the standard passes"),
            )
        if out.setdefault(name, bool(wanted)) != bool(wanted):
            raise OptionError(f"optimizations switch '{name}' both on and off", facts=[f"given: {dict(given)}"])
    return out


def installed(name: str) -> Pass:
    """An installed pass, placed as its descriptor says."""
    found = plugins.pass_spec(name)
    spec = found.spec
    return as_pass(
        plugins.load_pass(name),
        name=spec.name,
        stage=spec.stage,
        level=spec.level,
        before=spec.before,
        after=spec.after,
        version=spec.version,
        summary=spec.summary,
        origin=found.origin,
    )


def custom(given: Any) -> Pass:
    """A pass given to ``ml.compile``: placed by what it says of itself, else after the cleaning passes."""
    return as_pass(given)


def _distinct(passes: list[Pass]) -> list[Pass]:
    """User passes that share a name (two lambdas, say) get numbers."""
    seen: dict[str, int] = {}
    out = []
    for one in passes:
        seen[one.name] = seen.get(one.name, 0) + 1
        out.append(one if seen[one.name] == 1 else as_pass(one, name=f"{one.name}-{seen[one.name]}"))
    return out
