"""The options of ``ml.compile``, declared by their owners with ``mithril_options`` and validated before use."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from mithril.backend import describe, mismatch
from mithril.graph import OPTIONS, OptionError, closest, phrase_here, unknown
from mithril.plugins import Entry, Option, Plugin, PluginProblem, Plugins, default, name_owner, pip_hints


@dataclass(frozen=True)
class Readable:
    """Values that a function reads without an error: ``Annotated[float | str, Readable(parse_bytes)]``."""

    read: Callable[[Any], Any]


def read_value(value: Any, annotation: Any) -> None:
    """Call the functions of ``Readable`` on a value that matches the annotation; they raise the error of a mistake."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        read_value(value, next(argument for argument in arguments if mismatch(value, argument) is None))
    elif origin is Annotated:
        for note in arguments[1:]:
            if isinstance(note, Readable):
                note.read(value)


@dataclass(frozen=True, slots=True)
class OptionEntry:
    """An option and the distribution that owns it."""

    option: Option
    owner: str


class Settings(Mapping[str, Any]):
    """All options with their values, including defaults. Reading an option marks it as used, see ``unused``."""

    __slots__ = ("_read", "_values", "keywords")

    def __init__(self, values: Mapping[str, Any], keywords: Mapping[str, str]) -> None:
        self._values = dict(values)
        self._read: set[str] = set()
        self.keywords = MappingProxyType(dict(keywords))  # option that the user passed -> keyword of the call

    def __getitem__(self, name: str) -> Any:
        value = self._values[name]
        self._read.add(name)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def as_dict(self) -> dict[str, Any]:
        """Return all values without marking them as used, for cache keys, listings and reports."""
        return dict(self._values)

    def unused(self) -> list[str]:
        """Return the user's keywords that were never read; for a dictionary option, with its remaining keys."""
        return [
            _with_keys(keyword, self._values[name]) for name, keyword in self.keywords.items() if name not in self._read
        ]

    def __repr__(self) -> str:
        return f"Settings({', '.join(f'{name}={self._values[name]!r}' for name in self.keywords)})"


def _with_keys(keyword: str, value: Any) -> str:
    return f"{keyword} ({', '.join(map(str, value))})" if isinstance(value, Mapping) and value else keyword


class OptionRegistry:
    """All declared options of the core and of plugins, by name."""

    def __init__(self, source: Plugins | None = None) -> None:
        self._source = source or default
        self.by_name: dict[str, OptionEntry] = {}
        self.aliases: dict[str, str] = {}  # other keyword, or "group.key" -> name
        self.clashes: dict[str, tuple[str, ...]] = {}
        self.losers: dict[str, str] = {}  # option -> another plugin that declares it, recorded on use
        answers = self._source.options()
        claims: dict[str, list[Entry[Option]]] = {}
        for answer in answers:
            for word in _words(answer.spec):
                claims.setdefault(word, []).append(answer)
        owners = {word: name_owner(word, rivals) for word, rivals in claims.items()}
        for answer in answers:
            contested = next((w for w in _words(answer.spec) if owners[w] is not answer), None)
            if contested is None:
                self._declare(answer)
                continue
            origins = sorted({rival.origin for rival in claims[contested]})
            if owners[contested] is not None:
                self.losers[contested] = answer.origin
            else:
                self.clashes.setdefault(answer.spec.name, tuple(origins))
            self._source.loader.problem(answer.plugin, _clash(contested, origins, answer.plugin))

    def _declare(self, entry: Entry[Option]) -> None:
        option, plugin = entry.spec, entry.plugin
        try:
            wrong = mismatch(option.default, option.type)
            fault = f"the default of the option '{option.name}' of {entry.origin} has another type: {wrong}"
        except TypeError:
            wrong = fault = f"the type of the option '{option.name}' of {entry.origin} is none: {option.type!r}"
        if wrong:
            problem = PluginProblem(
                "broken",
                fault,
                hint=f"report it to the authors of {plugin.distribution}; {plugin.disable_hint()}",
                hook="mithril_options",
            )
            self._source.loader.problem(plugin, problem)
            return
        self.by_name[option.name] = OptionEntry(option, plugin.distribution)
        for alias in option.aliases:
            self.aliases[alias] = option.name

    def contested(self, names: Iterable[str]) -> list[str]:
        """Return one line for each of these options that another plugin also declares."""
        return [
            f"option '{name}' of {self.losers[name]} is not used: the name belongs to {self.by_name[name].owner}"
            for name in names
            if name in self.losers and name in self.by_name
        ]

    # ------------------------------------------------------------------------------------------------- resolving
    def resolve(self, user_options: Mapping[str, Any]) -> Settings:
        """Return the values of all options; raise OptionError for unknown, mistyped or conflicting user options."""
        spoken: dict[str, tuple[str, Any]] = {}  # option -> keyword used, value
        for keyword, value in self._flattened(user_options):
            name = self.aliases.get(keyword, keyword)
            if name not in self.by_name:
                raise self._unknown(keyword)
            if name in spoken and not _safely_equal(spoken[name][1], value):
                first, other = spoken[name]
                raise OptionError(
                    f"options '{first}' and '{keyword}' of ml.compile set the same option to different values",
                    facts=[f"{first} = {other!r}", f"{keyword} = {value!r}"],
                    hint=f"pass only '{name}'",
                )
            declared = self.by_name[name]
            if wrong := mismatch(value, declared.option.type):
                raise self._mistyped(keyword, wrong, value, declared)
            read_value(value, declared.option.type)
            self._check_keys(keyword, value, declared)
            spoken.setdefault(name, (keyword, value))
        values = {name: declared.option.default for name, declared in self.by_name.items()}
        values.update({name: value for name, (_, value) in spoken.items()})
        return Settings(values, {name: keyword for name, (keyword, _) in spoken.items()})

    def _check_keys(self, keyword: str, value: Any, declared: OptionEntry) -> None:
        """Raise OptionError if a dictionary has an unknown key or a value of the wrong type."""
        keys = declared.option.keys
        for key, item in value.items() if keys and isinstance(value, Mapping) else ():
            if key not in keys:
                valid_keys = [*keys, *(a.partition(".")[2] for a in self.aliases if a.startswith(f"{keyword}."))]
                message, facts, hint = unknown(f"key of {keyword}", str(key), valid_keys)
                raise OptionError(message, facts=facts, hint=hint)
            if wrong := mismatch(item, keys[key]):
                raise self._mistyped(keyword, f"at [{key!r}]: {wrong}", value, declared)
            read_value(item, keys[key])

    def split_by_backend(
        self, user_options: Mapping[str, Any], backends: Collection[str]
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """Split ``user_options`` into options that these backends read, and keywords with the backends that do."""
        applicable: dict[str, Any] = {}
        foreign: dict[str, str] = {}
        for keyword, value in self._flattened(user_options):
            owner = keyword.partition(".")[0]
            declared = self.by_name.get(owner) or self.by_name[self.aliases.get(keyword, keyword)]
            readers = declared.option.backends
            if readers and not set(readers) & set(backends):
                foreign[keyword] = ", ".join(readers)
            elif "." in keyword:
                applicable[self.aliases[keyword]] = value
            else:
                applicable[keyword] = value
        return applicable, foreign

    def _flattened(self, user_options: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """Yield keywords and values, with dictionary keys that are aliases as separate keywords."""
        grouped = {alias.partition(".")[0] for alias in self.aliases if "." in alias}
        for keyword, value in user_options.items():
            if keyword in grouped and isinstance(value, Mapping):
                aliased = {key: item for key, item in value.items() if f"{keyword}.{key}" in self.aliases}
                for key, item in aliased.items():
                    yield f"{keyword}.{key}", item
                if not aliased or len(aliased) < len(value):
                    yield keyword, {key: item for key, item in value.items() if key not in aliased}
            else:
                yield keyword, value

    def _unknown(self, keyword: str) -> OptionError:
        if origins := self.clashes.get(keyword):
            return OptionError(
                f"option '{keyword}' of ml.compile has more than one owner",
                facts=["declared by: " + ", ".join(origins)],
                hint="pip uninstall one of them, or add it to MITHRIL_DISABLE_PLUGINS",
            )
        owner = _known_owner(keyword)
        if owner is not None:
            return self._unowned(keyword, owner)
        if elsewhere := phrase_here(keyword, OPTIONS):
            return OptionError(f"unknown option '{keyword}' of ml.compile", hint=f"use {elsewhere}")
        words = [*self.by_name, *(alias for alias in self.aliases if "." not in alias)]
        similar = closest(keyword, words)
        return OptionError(
            f"unknown option '{keyword}' of ml.compile",
            facts=["closest: " + ", ".join(similar)] if similar else [],
            hint=f"did you mean '{similar[0]}'?" if similar else "`mithril options` lists all of them",
        )

    def _unowned(self, keyword: str, owner: str) -> OptionError:
        message = f"option '{keyword}' of ml.compile belongs to {owner}"
        installed = self._source.loader.named(owner)
        if not installed:
            return OptionError(f"{message}, which is not installed", hint=f"pip install {owner}")
        if problems := installed[0].problems:
            return OptionError(f"{message}, which is not in use", facts=[problems[0].what], hint=problems[0].hint)
        return OptionError(
            f"{message}, which does not declare it",
            facts=[f"installed: {installed[0].origin}"],
            hint=f"pip install --upgrade {owner}",
        )

    def _mistyped(self, keyword: str, wrong: str, value: Any, declared: OptionEntry) -> OptionError:
        suggestion = _nearest_choice(value, declared.option.type)
        return OptionError(
            f"option '{keyword}' of ml.compile: {wrong}",
            facts=[
                f"{declared.option.name}: {declared.option.help}",
                f"default: {_plain(declared.option.default)}, owner: {declared.owner}",
            ],
            hint=f"did you mean {suggestion!r}?" if suggestion else _example(declared.option, "for example "),
        )

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per option for listings: name, type, default, owner, aliases, help, example."""
        return [
            {
                "name": name,
                "type": describe(declared.option.type),
                "default": _plain(declared.option.default),
                "owner": declared.owner,
                "aliases": list(declared.option.aliases),
                "help": _help(declared.option),
                "example": _example(declared.option),
            }
            for name, declared in sorted(self.by_name.items())
        ]


def _example(option: Option, start: str = "") -> str:
    """Return the keyword with its example, or with the first choice that is not the default; empty if there is none."""
    choices: Sequence[Any] = (True, False) if option.type is bool else _choices(option.type)
    text = option.example or next((repr(choice) for choice in choices if choice != option.default), "")
    return f"{start}{option.name}={text}" if text else ""


def _help(option: Option) -> str:
    if not option.keys:
        return option.help
    keys = ", ".join(f"{key} ({describe(kind)})" for key, kind in option.keys.items())
    return f"{option.help} Keys: {keys}."


def _known_owner(name: str) -> str | None:
    """Return the distribution that owns an option of ``ml.compile``, or None if it is not known."""
    return next((distribution for distribution, names in pip_hints.OPTIONS.items() if name in names), None)


def _words(option: Option) -> tuple[str, ...]:
    return (option.name, *option.aliases)


def _clash(word: str, origins: Sequence[str], plugin: Plugin) -> PluginProblem:
    return PluginProblem(
        "clash",
        f"the option '{word}' of ml.compile has more than one owner",
        ("declared by: " + ", ".join(origins),),
        f"pip uninstall one of them, or {plugin.disable_hint()}",
    )


def _safely_equal(left: Any, right: Any) -> bool:
    try:
        return left is right or bool(left == right)
    except Exception:  # the == of arrays has no truth value, so equality is unknown
        return False


def _nearest_choice(value: Any, annotation: Any) -> str | None:
    similar = closest(value, _choices(annotation)) if isinstance(value, str) else []
    return similar[0] if similar else None


def _choices(annotation: Any) -> list[str]:
    """Return the words that an annotation of literals accepts."""
    direct = getattr(annotation, "__args__", ())
    return [c for a in direct for c in (a, *getattr(a, "__args__", ())) if isinstance(c, str)]


def _plain(default: Any) -> str:
    return repr(dict(default)) if isinstance(default, Mapping) else repr(default)


@lru_cache(maxsize=1)
def _registry(generation: object) -> OptionRegistry:
    return OptionRegistry()


def option_registry() -> OptionRegistry:
    """Return the options of this process, rebuilt after plugins were reloaded."""
    return _registry(default.generation())


def resolve_options(user_options: Mapping[str, Any]) -> Settings:
    """Validate the user's options of ``ml.compile`` and add the defaults."""
    return option_registry().resolve(user_options)


def default_settings() -> dict[str, Any]:
    """Return the default of every option."""
    return option_registry().resolve({}).as_dict()


def split_options(user_options: Mapping[str, Any], backends: Collection[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Split the user's options into those for these backends, and keywords for other backends only."""
    return option_registry().split_by_backend(user_options, backends)


def declared_options() -> list[Option]:
    """Return the declarations of all options."""
    return [one.option for one in option_registry().by_name.values()]


def option_rows() -> list[dict[str, Any]]:
    """Return all options for listings."""
    return option_registry().rows()
