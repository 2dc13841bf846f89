"""Which passes run: the level's, switched by ``optimizations=``, joined by ``custom_passes=``, amended by plugins."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mithril import plugins
from mithril.base import LEVELS, STAGES, OptionError, PassError, unknown
from mithril.passes import Pass, PassManager, as_pass, placement_of
from mithril.plugins import CompileContext, PipelineDraft, PluginWarning, option_registry

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
    return PassManager(_distinct(passes, context), check=CHECKS[settings["verify"]])


def chosen(settings: Mapping[str, Any], context: CompileContext) -> list[Any]:
    """The passes of one compilation by name, the user's own as they are; nothing is imported, names are checked."""
    names = level_passes(context.level)
    names += [n for n in dict.fromkeys((*context.backend.passes, *asked_for(settings))) if n not in names]
    names = _prioritized(names, settings["optimize_for"], context)
    for name, wanted in switches(settings["optimizations"]).items():
        if wanted and name not in names:
            names.append(name)
        elif not wanted and name in names:
            names.remove(name)
    draft = plugins.amend_pipeline(PipelineDraft(names), context.target, context.level)
    for change in draft.changes:
        context.decisions.record("choice", change)
    names = [draft.replaced.get(n, n) for n in names if n not in draft.removed]
    names += [n for n in draft.added if n not in names]
    passes = [*names, *settings["custom_passes"]]
    for one in passes:
        if isinstance(one, str):
            plugins.pass_spec(one)
        else:
            custom(one)
    _record_providers(names, context)
    return passes


def _prioritized(names: list[str], priority: str | None, context: CompileContext) -> list[str]:
    """Add the passes that favor what ``optimize_for`` names, and leave out those that favor the other."""
    if priority is None:
        return names
    favored = {name: found.spec.favors for name, found in plugins.passes().items() if found.spec.favors}
    chosen = [n for n in names if favored.get(n, priority) == priority]
    chosen += [n for n, favors in favored.items() if favors == priority and n not in chosen]
    added, dropped = sorted(set(chosen) - set(names)), sorted(set(names) - set(chosen))
    what = [f"with {', '.join(added)}"] * bool(added) + [f"without {', '.join(dropped)}"] * bool(dropped)
    text = ", ".join(what) or "the passes of this level are those for it"
    context.decisions.record("choice", f"optimize_for='{priority}': {text}")
    return chosen


def _record_providers(names: Iterable[str], context: CompileContext) -> None:
    """Record third parties' passes, and each pass that a clash of names or a void placement affects."""
    table = plugins.pass_table()
    rank = LEVELS.index(context.level)
    for name in names:
        entry = plugins.pass_spec(name)
        if not entry.plugin.first_party:
            context.decisions.record("choice", f"pass '{name}' by {entry.origin}")
        for fault in plugins.pass_placement(name).faults:
            record_fault(context, f"{fault.what} ({fault.hint})")
        for option in entry.spec.options:
            if option not in context.options:
                record_fault(context, f"pass '{name}' of {entry.origin}: no installed plugin declares '{option}'")
        for word in (name, *entry.spec.aliases):
            if text := table.clash_text(word):
                record_fault(context, text)
    for name, rivals in table.clashes.items():
        if any(r.spec.name == name and r.spec.level and LEVELS.index(r.spec.level) <= rank for r in rivals):
            record_fault(context, table.clash_text(name) or name)


def record_clashes(context: CompileContext) -> None:
    """Record each plugin that claims the name of this compilation's backend, target or options in vain."""
    settings: Any = context.options
    tables = {"mithril_backends": context.backend.name, "mithril_targets": settings["target_hardware"]}
    texts = [plugins.clash_text(hook, name) for hook, name in tables.items() if name]
    for text in (*texts, *option_registry().contested(settings.given)):
        if text:
            record_fault(context, text)


def record_fault(context: CompileContext, message: str) -> None:
    """Record what a plugin's mistake changes in this compilation, and warn once."""
    context.decisions.record("ignored", message, warning=PluginWarning)


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
            if settings.get(option):
                names.add(name)
    return sorted(names)


def switches(given: Mapping[str, bool]) -> dict[str, bool]:
    """``optimizations={...}`` with aliases resolved; unknown names and contradictions are errors."""
    names, aliases = plugins.passes(), plugins.pass_aliases()
    groups = _groups()
    out: dict[str, bool] = {}
    grouped: dict[str, bool] = {}
    for word, wanted in given.items():
        for member in groups.get(word, ()):
            if not wanted or names[member].spec.level in ("low", "medium"):
                grouped[member] = grouped.get(member, True) and wanted
        if word in groups:
            continue
        name = aliases.get(word, word)
        if name not in names:
            known = [*names, *aliases, *groups]
            what, facts, hint = unknown("optimization", word, known)
            raise OptionError(
                what,
                facts=facts,
                hint=hint or (None if known else "pip install mithril-passes brings the standard passes"),
            )
        if out.setdefault(name, bool(wanted)) != bool(wanted):
            raise OptionError(f"optimizations switch '{name}' both on and off", facts=[f"given: {dict(given)}"])
    return {**grouped, **out}


def _groups() -> dict[str, list[str]]:
    """Return the words that switch several passes, with these passes."""
    found: dict[str, list[str]] = {}
    for name, entry in plugins.passes().items():
        for word in entry.spec.groups:
            found.setdefault(word, []).append(name)
    return found


def installed(name: str) -> Pass:
    """An installed pass, placed as its descriptor says."""
    found = plugins.pass_spec(name)
    spec, place = found.spec, plugins.pass_placement(name)
    loaded = plugins.load_pass(name)
    if repeated := placement_of(loaded):
        raise PassError(
            f"pass '{spec.name}' of {found.origin} is placed twice: by its PassSpec, and by {', '.join(repeated)}",
            facts=[f"loaded from: {spec.loads}"],
            hint=f"report it to the authors of {found.plugin.distribution}: only the PassSpec places an installed pass",
        )
    return as_pass(
        loaded,
        name=spec.name,
        stage=spec.stage,
        level=spec.level,
        before=place.before,
        after=place.after,
        version=spec.version,
        summary=spec.summary,
        origin=found.origin,
        trusted=found.plugin.first_party,
    )


def custom(given: Any) -> Pass:
    """A pass given to ``ml.compile``: placed by what it says of itself, else after the cleaning passes."""
    one = as_pass(given)
    aliases, entries = plugins.pass_aliases(), plugins.passes()
    names = {f: tuple(aliases.get(n, n) for n in getattr(one, f)) for f in ("before", "after")}
    for field, words in names.items():
        for word in words:
            other = entries.get(word)
            if other is not None and other.spec.stage != one.stage:
                raise PassError(
                    f"pass '{one.name}' says {field}='{word}', but '{word}' runs in stage '{other.spec.stage}'",
                    facts=[f"'{one.name}' runs in stage '{one.stage}'", f"stages, in order: {', '.join(STAGES)}"],
                    hint=f"place it with stage='{other.spec.stage}', or leave {field}= out",
                )
    return one if (names["before"], names["after"]) == (one.before, one.after) else as_pass(one, **names)


def _distinct(passes: list[Pass], context: CompileContext) -> list[Pass]:
    """Number the user's passes that share a name; check the names they are placed by."""
    seen: dict[str, int] = {}
    out = []
    for one in passes:
        seen[one.name] = seen.get(one.name, 0) + 1
        if seen[one.name] > 1:
            new = f"{one.name}-{seen[one.name]}"
            context.decisions.record("choice", f"a pass named '{one.name}' exists: the custom pass runs as '{new}'")
            one = as_pass(one, name=new)
        out.append(one)
    names = [*{*seen, *plugins.passes(), *plugins.pass_table().clashes}]
    for one in out:
        for word in (*one.before, *one.after):
            if word not in names:
                what, facts, hint = unknown(f"pass in before= or after= of pass '{one.name}':", word, names)
                raise PassError(what, facts=facts, hint=hint or "`mithril passes` lists the installed passes")
    return out
