"""Selection of passes: those of the level, changed by ``optimizations=``, ``custom_passes=`` and plugins."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from mithril import plugins
from mithril.compiler.option_table import option_registry
from mithril.graph import LEVELS, STAGES, OptionError, PassError, unknown
from mithril.passes import Pass, PassManager, as_pass, placement_of
from mithril.plugins import CompileContext, PipelineDraft, PluginWarning

CHECKS = {"none": "none", "structure": "structure", "numeric": "numeric"}


def optimization_level(settings: Mapping[str, Any]) -> str:
    """Return the effective level: at least medium with ``graph_optimization=True``."""
    level: str = settings["optimization_level"]
    if settings["graph_optimization"] and LEVELS.index(level) < LEVELS.index("medium"):
        return "medium"
    return level


def make_pipeline(selection: Sequence[Any], settings: Mapping[str, Any], context: CompileContext) -> PassManager:
    """Import the selected passes of one compilation, and put them in order."""
    check = CHECKS[settings["verify"]]
    if settings["custom_passes"]:
        passes = [installed(p) if isinstance(p, str) else custom(p) for p in selection]
        return PassManager(_number_duplicates(passes, context), check=check)
    return _installed_pipeline(tuple(selection), check, plugins.generation())


@lru_cache(maxsize=256)
def _installed_pipeline(names: tuple[str, ...], check: str, generation: object) -> PassManager:
    return PassManager([_installed(name, generation) for name in names], check=check)


def select_passes(settings: Mapping[str, Any], context: CompileContext) -> list[Any]:
    """Return the names of the passes and the custom passes of one compilation; check names without imports."""
    names = level_passes(context.level)
    if context.level != LEVELS[0] and not any(plugins.pass_spec(name).plugin.first_party for name in names):
        message = f"optimization_level='{context.level}': no standard pass is installed, so programs are slower"
        context.decisions.record("ignored", f"{message}; pip install mithril-passes")
    names += [n for n in dict.fromkeys((*context.backend.passes, *requested_passes(settings))) if n not in names]
    names = _prioritized(names, settings["optimize_for"], context)
    for name, enabled in switches(settings["optimizations"]).items():
        if enabled and name not in names:
            names.append(name)
        elif not enabled and name in names:
            names.remove(name)
    draft = plugins.amend_pipeline(PipelineDraft(names), context.target, context.level)
    for change in draft.changes:
        context.decisions.record("plugin", change)
    names = [draft.replaced.get(n, n) for n in names if n not in draft.removed]
    names += [n for n in draft.added if n not in names]
    passes = [*names, *settings["custom_passes"]]
    entries = plugins.passes()
    for one in passes:
        if not isinstance(one, str):
            custom(one)
        elif one not in entries:
            plugins.pass_spec(one)
    _record_faults(names, context)
    return passes


def _prioritized(names: list[str], priority: str | None, context: CompileContext) -> list[str]:
    """Add the passes that favor the value of ``optimize_for``, and remove those that favor the other value."""
    if priority is None:
        return names
    favored = {name: entry.spec.favors for name, entry in plugins.passes().items() if entry.spec.favors}
    selection = [n for n in names if favored.get(n, priority) == priority]
    selection += [n for n, favors in favored.items() if favors == priority and n not in selection]
    added, dropped = sorted(set(selection) - set(names)), sorted(set(names) - set(selection))
    changes = [f"with {', '.join(added)}"] * bool(added) + [f"without {', '.join(dropped)}"] * bool(dropped)
    text = ", ".join(changes) or "no change of the passes of this level"
    context.decisions.record("choice", f"optimize_for='{priority}': {text}")
    return selection


def _record_faults(names: Iterable[str], context: CompileContext) -> None:
    """Record passes that are affected by name conflicts or invalid placements."""
    for option, text in _faults(tuple(names), context.level, plugins.generation()):
        if option is None or option not in context.options:
            record_fault(context, text)


@lru_cache(maxsize=256)
def _faults(names: tuple[str, ...], level: str, generation: object) -> list[tuple[str | None, str]]:
    """Return the faults of passes, each with the option whose absence it reports, if it does."""
    table = plugins.pass_table()
    rank = LEVELS.index(level)
    faults: list[tuple[str | None, str]] = []
    for name in names:
        entry = plugins.pass_spec(name)
        faults += [(None, f"{fault.what} ({fault.hint})") for fault in plugins.pass_placement(name).faults]
        for option in entry.spec.options:
            faults.append((option, f"pass '{name}' of {entry.origin}: no installed plugin declares '{option}'"))
        faults += [(None, text) for word in (name, *entry.spec.aliases) if (text := table.clash_text(word))]
    for name, rivals in table.clashes.items():
        if any(r.spec.name == name and r.spec.level and LEVELS.index(r.spec.level) <= rank for r in rivals):
            faults.append((None, table.clash_text(name) or name))
    return faults


def record_clashes(context: CompileContext) -> None:
    """Record each plugin whose claim to a name of this compilation's backend, target or options is ignored."""
    settings: Any = context.options
    tables = {"mithril_backends": context.backend.name, "mithril_targets": settings["target_hardware"]}
    texts = [plugins.clash_text(hook, name) for hook, name in tables.items() if name]
    for text in (*texts, *option_registry().contested(settings.keywords)):
        if text:
            record_fault(context, text)


_warned: set[str] = set()


def record_fault(context: CompileContext, message: str) -> None:
    """Record how a plugin's error affects this compilation, and warn once per process."""
    context.decisions.record("ignored", message, warning=PluginWarning, warn=message not in _warned)
    _warned.add(message)


def level_passes(level: str) -> list[str]:
    """Return the names of the installed passes that a level includes."""
    included = LEVELS[: LEVELS.index(level) + 1]
    return sorted([name for name, entry in plugins.passes().items() if entry.spec.level in included])


def requested_passes(settings: Mapping[str, Any]) -> list[str]:
    """Return the names of the installed passes that are enabled by an option."""
    names, passed = set(), getattr(settings, "keywords", {})
    for name, entry in plugins.passes().items():
        for option in entry.spec.options:  # read all of them, so that none is reported as ignored
            value = settings.get(option)
            # An empty dictionary leaves all keys at their defaults.
            if value or (value == {} and option in passed):
                names.add(name)
    return sorted(names)


def switches(requested: Mapping[str, bool]) -> dict[str, bool]:
    """Return ``optimizations={...}`` with aliases resolved; raise OptionError for unknown names and conflicts."""
    names, aliases = plugins.passes(), plugins.pass_aliases()
    groups = _groups()
    out: dict[str, bool] = {}
    grouped: dict[str, bool] = {}
    for word, enabled in requested.items():
        for member in groups.get(word, ()):
            if not enabled or names[member].spec.level in ("low", "medium"):
                grouped[member] = grouped.get(member, True) and enabled
        if word in groups:
            continue
        name = aliases.get(word, word)
        if name not in names:
            valid_names = [*names, *aliases, *groups]
            message, facts, hint = unknown("optimization", word, valid_names)
            raise OptionError(
                message,
                facts=facts,
                hint=hint or (None if valid_names else "pip install mithril-passes provides the standard passes"),
            )
        if out.setdefault(name, bool(enabled)) != bool(enabled):
            raise OptionError(f"optimizations both enable and disable '{name}'", facts=[f"got: {dict(requested)}"])
    return {**grouped, **out}


def _groups() -> dict[str, list[str]]:
    """Return the groups of passes by name."""
    groups: dict[str, list[str]] = {}
    for name, entry in plugins.passes().items():
        for word in entry.spec.groups:
            groups.setdefault(word, []).append(name)
    return groups


def installed(name: str) -> Pass:
    """Load an installed pass, placed by its descriptor."""
    return _installed(name, plugins.default.generation())


@lru_cache(maxsize=1024)
def _installed(name: str, generation: object) -> Pass:
    entry = plugins.pass_spec(name)
    spec, place = entry.spec, plugins.pass_placement(name)
    loaded = plugins.load_pass(name)
    if repeated := placement_of(loaded):
        raise PassError(
            f"pass '{spec.name}' of {entry.origin} is placed twice: by its PassSpec, and by {', '.join(repeated)}",
            facts=[f"loaded from: {spec.loads}"],
            hint=f"report it to the authors of {entry.plugin.distribution}: only the PassSpec places an installed pass",
        )
    try:
        return as_pass(
            loaded,
            name=spec.name,
            stage=spec.stage,
            level=spec.level,
            before=place.before,
            after=place.after,
            version=spec.version,
            summary=spec.summary,
            origin=entry.origin,
            trusted=entry.plugin.first_party,
        )
    except (PassError, TypeError) as cause:
        raise PassError(
            f"pass '{spec.name}' of {entry.origin} is {loaded!r}, not a pass",
            facts=[f"loaded from: {spec.loads}", str(cause).partition("\n")[0], "accepted: a function graph -> graph"],
            hint=f"report it to the authors of {entry.plugin.distribution}",
        ) from cause


def custom(value: Any) -> Pass:
    """Return a custom pass of ``ml.compile``, placed by its own declaration or after the cleanup passes."""
    one = as_pass(value)
    aliases, entries = plugins.pass_aliases(), plugins.passes()
    names = {f: tuple(aliases.get(n, n) for n in getattr(one, f)) for f in ("before", "after")}
    for field, words in names.items():
        for word in words:
            other = entries.get(word)
            if other is not None and other.spec.stage != one.stage:
                raise PassError(
                    f"pass '{one.name}' says {field}='{word}', but '{word}' runs in stage '{other.spec.stage}'",
                    facts=[f"'{one.name}' runs in stage '{one.stage}'", f"stages, in order: {', '.join(STAGES)}"],
                    hint=f"set stage='{other.spec.stage}', or omit {field}=",
                )
    return one if (names["before"], names["after"]) == (one.before, one.after) else as_pass(one, **names)


def _number_duplicates(passes: list[Pass], context: CompileContext) -> list[Pass]:
    """Number the custom passes that share a name, and check their ``before`` and ``after``."""
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
                message, facts, hint = unknown(f"pass in before= or after= of pass '{one.name}':", word, names)
                raise PassError(message, facts=facts, hint=hint or "`mithril passes` lists the installed passes")
    return out
