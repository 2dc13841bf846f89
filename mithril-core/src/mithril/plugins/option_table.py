"""Every keyword of ``ml.compile``: the core's own, joined with those that plugins declare; checked before use.

``CompileOptions`` is what editors see. The core's table below takes its types from there; a test holds the rest of it
equal to what the project's plugins declare.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict, get_type_hints

from mithril import plugins
from mithril.base.annotations import Least, Positive, describe, mismatch
from mithril.base.dims import Dim
from mithril.base.errors import OptionError, closest, unknown
from mithril.plugins.hookspecs import Option
from mithril.plugins.loader import Plugin, Problem
from mithril.plugins.pip_hints import option_owner

if TYPE_CHECKING:
    from mithril.plugins import Plugins, Registered

Path = str | os.PathLike[str]
_NOTHING: Mapping[str, Any] = MappingProxyType({})


class CompileOptions(TypedDict, total=False):
    """Keywords of ``ml.compile`` with their types, for editors and type checkers (`mithril options` explains them)."""

    autodiff: Literal["graph", "native"]
    backend_map: Mapping[str, Any]
    cache: bool
    cache_dir: Path | None
    checks: bool
    code_transformers: Sequence[Callable[[str], str]]
    constants: Mapping[str, Any]
    custom_passes: Sequence[Any]
    dynamic_control_flow: bool
    file_path: Path | None
    graph_optimization: bool
    hints: Mapping[str, Any]
    inference: bool
    jit: bool | None
    jit_options: Mapping[str, Any]
    max_memory_gb: float | str | None
    memory_planning: bool | str | Callable[..., Any]
    max_programs: Positive
    num_threads: Positive | None
    optimization_level: Literal["none", "low", "medium", "high"]
    optimizations: Mapping[str, bool]
    optimize_for: Literal["throughput", "latency"] | None
    outputs: Sequence[str] | None
    precision: Literal["float32", "float16", "bfloat16"] | None
    seed: int | None
    semantics: Literal["portable", "native"]
    shapes: Mapping[str, Sequence[int | str | Dim | None]]
    static_inference: bool
    static_shapes: bool
    static_types: bool
    strict: bool
    target_hardware: str | None
    template_path: Path | None
    timeout: Annotated[float, Least(0, open=True)] | None
    trainable: Sequence[str] | None
    types: Mapping[str, Any]
    verify: Literal["none", "structure", "numeric"]
    # mithril-passes
    checkpoint_segments: Positive | None
    gradient_checkpointing: bool
    mixed_precision: bool | Mapping[str, Any]
    # mithril-tools
    dump_format: Literal["dot", "json", "text"]
    dump_graph: Path | None
    intermediate_dir: Path | None
    profile: bool
    profile_output: Path | None
    save_intermediates: bool
    trace_shapes: bool
    verbose: bool
    visualize: bool
    viz_options: Mapping[str, Any]
    # mithril-jax
    jax_options: Mapping[str, Any]
    pjit: bool
    vectorize: bool
    xla_optimization_level: int | None
    # mithril-torch
    torch_dynamo: bool
    torch_fx: bool
    torch_options: Mapping[str, Any]
    # mithril-cbackend
    cpu_options: Mapping[str, Any]
    mobile_options: Mapping[str, Any]
    # mithril-train
    quantization_aware: bool | Mapping[str, Any]
    # mithril-parallel
    parallelism: Literal["data", "fsdp", "model", "pipeline"] | None
    pipeline_chunks: int | None
    pipeline_schedule: Literal["1f1b", "gpipe"]
    pipeline_stages: int | None
    tensor_split_dims: Mapping[str, int]
    # mithril-tpu
    tpu_options: Mapping[str, Any]
    tpu_replicas: int | None


# name: (default, help, *aliases). The types stand in CompileOptions.
_CORE: dict[str, tuple[Any, ...]] = {
    "autodiff": ("graph", "Gradients as a graph that passes see, or by the backend's own autograd."),
    "backend_map": (
        _NOTHING,
        "Sub-models to run elsewhere: the name set with set_attribute('backend', name) -> backend.",
    ),
    "cache": (False, "Keep what was compiled on disk and use it again."),
    "cache_dir": (None, "Folder of the cache; None is the user's cache folder."),
    "checks": (False, "Raise where an index lies outside of what it indexes; else it is moved to the nearest inside."),
    "code_transformers": ((), "Functions code -> code, applied to the generated source in order."),
    "constants": (_NOTHING, "Inputs whose values are fixed now: name -> array."),
    "custom_passes": ((), "Functions graph -> graph, pass objects, or names of installed passes."),
    "dynamic_control_flow": (True, "False: every branch and loop must resolve at compile time."),
    "file_path": (None, "Write the generated source to this file; with gradients to net.grad.py beside net.py."),
    "graph_optimization": (False, "True: at least optimization_level 'medium'."),
    "hints": (_NOTHING, "Expectations of the inputs."),
    "inference": (False, "No gradients; dropout off, batch norm with its running statistics."),
    "jit": (None, "Compile with the backend's just-in-time compiler; None is the backend's best choice."),
    "jit_options": (_NOTHING, "Options of the backend's just-in-time compiler."),
    "max_memory_gb": (None, "Refuse programs and calls that need more: 8, '8GB', '512MiB'."),
    "memory_planning": (
        True,
        "Plan of the arena: 'smallest' (True), 'greedy', 'best_fit', 'apart' (False), 'module:function', a function.",
        "optimizations.memory_planning",
    ),
    "max_programs": (64, "Programs kept for calls of different shapes; the least recently used goes first."),
    "num_threads": (None, "Threads the backend may use; None leaves its own default.", "cpu_options.num_threads"),
    "optimization_level": ("medium", "Which passes run; see `mithril passes`."),
    "optimizations": (_NOTHING, "Single passes switched on or off on top of the level: {'fusion': False}."),
    "optimize_for": (
        None,
        "Throughput joins products of one operand; latency leaves them apart and rounds no batches up.",
        "hints.inference_priority",
    ),
    "outputs": (None, "Names of the values to return; None is what the model declares."),
    "precision": (None, "Dtype of the parameters and the computation; None keeps the model's."),
    "seed": (None, "Seed of the parameters and of random operations."),
    "semantics": ("portable", "One meaning on all backends, or the backend's own where it is faster."),
    "shapes": (_NOTHING, "Shapes of inputs; per axis a size, a name, None for any size, or a Dim with bounds."),
    "static_inference": (False, "Inference with parameters, shapes and memory fixed now."),
    "static_shapes": (False, "An error where a shape stays symbolic."),
    "static_types": (False, "An error where a dtype would be promoted."),
    "strict": (False, "Whatever would only be noted in compiled.decisions is an error."),
    "target_hardware": (None, "Hardware to compile for; see `mithril plugins`."),
    "template_path": (None, "Jinja2 template to write the source with."),
    "timeout": (None, "Seconds after which compiling gives up."),
    "trainable": (None, "Names or patterns of the inputs to differentiate by; None is all parameters."),
    "types": (_NOTHING, "Dtypes of inputs: name -> dtype."),
    "verify": ("structure", "What is checked after each pass: nothing, the graph, or its values too."),
}


# Options that take a dictionary whose keys are the same on every backend: key -> type.
_KEYS: Mapping[str, Mapping[str, Any]] = {"hints": {"input_batch_size_range": Sequence[int]}}


@dataclass(frozen=True, slots=True)
class Declared:
    """An option and the distribution that owns it."""

    option: Option
    owner: str


@cache
def core_options() -> tuple[Option, ...]:
    """The options that the core itself honours."""
    types = get_type_hints(CompileOptions, include_extras=True)
    return tuple(
        Option(name, types[name], row[0], row[1], tuple(row[2:]), _KEYS.get(name, {})) for name, row in _CORE.items()
    )


class Settings(Mapping[str, Any]):
    """All options with their values, defaults filled in. Reading one marks it as used; ``unused`` are left over."""

    __slots__ = ("_read", "_values", "given")

    def __init__(self, values: Mapping[str, Any], given: Mapping[str, str]) -> None:
        self._values = dict(values)
        self._read: set[str] = set()
        self.given = MappingProxyType(dict(given))  # options that the user named -> the keyword they used

    def __getitem__(self, name: str) -> Any:
        value = self._values[name]
        self._read.add(name)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def peek(self) -> dict[str, Any]:
        """All values, without marking them as used: for cache keys, listings, reports."""
        return dict(self._values)

    def unused(self) -> list[str]:
        """Keywords that the user gave and nobody has read; of groups, the keys that are left (others are options)."""
        return [
            _with_keys(keyword, self._values[name]) for name, keyword in self.given.items() if name not in self._read
        ]

    def __repr__(self) -> str:
        return f"Settings({', '.join(f'{name}={self._values[name]!r}' for name in self.given)})"


def _with_keys(keyword: str, value: Any) -> str:
    return f"{keyword} ({', '.join(map(str, value))})" if isinstance(value, Mapping) and value else keyword


class Registry:
    """All declared options, by name; built from the core's table and one answer of the plugins."""

    def __init__(self, source: Plugins | None = None) -> None:
        self._source = source or plugins.default
        self.by_name: dict[str, Declared] = {}
        self.aliases: dict[str, str] = {}  # other keyword, or "group.key" -> name
        self.clashes: dict[str, tuple[str, ...]] = {}
        for option in core_options():
            self._declare(option, "mithril-core")
        self.losers: dict[str, str] = {}  # option -> who else declares it, to be recorded where it is used
        answers = self._source.options()
        claims: dict[str, list[Registered[Option]]] = {}
        for answer in answers:
            for word in _words(answer.spec):
                claims.setdefault(word, []).append(answer)
        core = {word for option in core_options() for word in _words(option)}
        owners = {word: None if word in core else plugins.name_owner(word, rivals) for word, rivals in claims.items()}
        for answer in answers:
            contested = next((w for w in _words(answer.spec) if owners[w] is not answer), None)
            if contested is None:
                self._declare(answer.spec, answer.plugin.distribution)
                continue
            origins = ["mithril-core"] if contested in core else []
            origins += sorted({rival.origin for rival in claims[contested]})
            if contested in core or owners[contested] is not None:
                self.losers[contested] = answer.origin
            else:
                self.clashes.setdefault(answer.spec.name, tuple(origins))
            self._source.loader.problem(answer.plugin, _clash(contested, origins, answer.plugin))

    def _declare(self, option: Option, owner: str) -> None:
        self.by_name[option.name] = Declared(option, owner)
        for alias in option.aliases:
            self.aliases[alias] = option.name

    def contested(self, names: Iterable[str]) -> list[str]:
        """One line for each of these options that another plugin declares too."""
        return [
            f"option '{name}' of {self.losers[name]} is not used: the name belongs to {self.by_name[name].owner}"
            for name in names
            if name in self.losers and name in self.by_name
        ]

    # ------------------------------------------------------------------------------------------------- resolving
    def resolve(self, given: Mapping[str, Any]) -> Settings:
        """The values of all options for what a user gave: known, of the right type, free of contradictions."""
        spoken: dict[str, tuple[str, Any]] = {}  # option -> keyword used, value
        for keyword, value in self._flattened(given):
            name = self.aliases.get(keyword, keyword)
            if name not in self.by_name:
                raise self._unknown(keyword)
            if name in spoken and not _same(spoken[name][1], value):
                first, other = spoken[name]
                raise OptionError(
                    f"options '{first}' and '{keyword}' of ml.compile mean the same thing and contradict each other",
                    facts=[f"{first} = {other!r}", f"{keyword} = {value!r}"],
                    hint=f"give only '{name}'",
                )
            declared = self.by_name[name]
            if wrong := mismatch(value, declared.option.type):
                raise self._mistyped(keyword, wrong, value, declared)
            self._check_keys(keyword, value, declared)
            spoken.setdefault(name, (keyword, value))
        values = {name: declared.option.default for name, declared in self.by_name.items()}
        values.update({name: value for name, (_, value) in spoken.items()})
        return Settings(values, {name: keyword for name, (keyword, _) in spoken.items()})

    def _check_keys(self, keyword: str, value: Any, declared: Declared) -> None:
        """Raise where a dictionary has a key that its option does not, or a value of another type."""
        keys = declared.option.keys
        for key, item in value.items() if keys and isinstance(value, Mapping) else ():
            if key not in keys:
                known = [*keys, *(a.partition(".")[2] for a in self.aliases if a.startswith(f"{keyword}."))]
                what, facts, hint = unknown(f"key of {keyword}", str(key), known)
                raise OptionError(what, facts=facts, hint=hint)
            if wrong := mismatch(item, keys[key]):
                raise self._mistyped(keyword, f"at [{key!r}]: {wrong}", value, declared)

    def fitted(self, given: Mapping[str, Any], backends: Collection[str]) -> tuple[dict[str, Any], dict[str, str]]:
        """Split ``given`` into options for these backends, and keywords for others only with the names of those."""
        kept: dict[str, Any] = {}
        foreign: dict[str, str] = {}
        for keyword, value in self._flattened(given):
            owner = keyword.partition(".")[0]
            declared = self.by_name.get(owner) or self.by_name[self.aliases.get(keyword, keyword)]
            readers = declared.option.backends
            if readers and not set(readers) & set(backends):
                foreign[keyword] = ", ".join(readers)
            elif "." in keyword:
                kept[self.aliases[keyword]] = value
            else:
                kept[keyword] = value
        return kept, foreign

    def _flattened(self, given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """Keywords and values, with the keys that are aliases taken out of the dictionaries they stood in."""
        grouped = {alias.partition(".")[0] for alias in self.aliases if "." in alias}
        for keyword, value in given.items():
            if keyword in grouped and isinstance(value, Mapping):
                moved = {key: item for key, item in value.items() if f"{keyword}.{key}" in self.aliases}
                for key, item in moved.items():
                    yield f"{keyword}.{key}", item
                if not moved or len(moved) < len(value):
                    yield keyword, {key: item for key, item in value.items() if key not in moved}
            else:
                yield keyword, value

    def _unknown(self, keyword: str) -> OptionError:
        if origins := self.clashes.get(keyword):
            return OptionError(
                f"option '{keyword}' of ml.compile has more than one owner",
                facts=["declared by: " + ", ".join(origins)],
                hint="pip uninstall one of them, or name it in MITHRIL_DISABLE_PLUGINS",
            )
        owner = option_owner(keyword)
        if owner is not None:
            return self._unowned(keyword, owner)
        words = [*self.by_name, *(alias for alias in self.aliases if "." not in alias)]
        near = closest(keyword, words)
        return OptionError(
            f"unknown option '{keyword}' of ml.compile",
            facts=["closest: " + ", ".join(near)] if near else [],
            hint=f"did you mean '{near[0]}'?" if near else "`mithril options` lists all of them",
        )

    def _unowned(self, keyword: str, owner: str) -> OptionError:
        what = f"option '{keyword}' of ml.compile belongs to {owner}"
        found = self._source.loader.named(owner)
        if not found:
            return OptionError(f"{what}, which is not installed", hint=f"pip install {owner}")
        if problems := found[0].problems:
            return OptionError(f"{what}, which is not in use", facts=[problems[0].what], hint=problems[0].hint)
        return OptionError(
            f"{what}, which does not declare it",
            facts=[f"installed: {found[0].origin}"],
            hint=f"pip install --upgrade {owner}",
        )

    def _mistyped(self, keyword: str, wrong: str, value: Any, declared: Declared) -> OptionError:
        near = _nearest_choice(value, declared.option.type)
        return OptionError(
            f"option '{keyword}' of ml.compile: {wrong}",
            facts=[
                f"{declared.option.name}: {declared.option.help}",
                f"default: {_plain(declared.option.default)}, owner: {declared.owner}",
            ],
            hint=f"did you mean {near!r}?" if near else None,
        )

    def rows(self) -> list[dict[str, Any]]:
        """One row per option for listings: name, type, default, owner, aliases, help."""
        return [
            {
                "name": name,
                "type": describe(declared.option.type),
                "default": _plain(declared.option.default),
                "owner": declared.owner,
                "aliases": list(declared.option.aliases),
                "help": _help(declared.option),
            }
            for name, declared in sorted(self.by_name.items())
        ]


def _help(option: Option) -> str:
    if not option.keys:
        return option.help
    keys = ", ".join(f"{key} ({describe(kind)})" for key, kind in option.keys.items())
    return f"{option.help} Keys: {keys}."


def _words(option: Option) -> tuple[str, ...]:
    return (option.name, *option.aliases)


def _clash(word: str, origins: Sequence[str], plugin: Plugin) -> Problem:
    return Problem(
        "clash",
        f"the option '{word}' of ml.compile has more than one owner",
        ("declared by: " + ", ".join(origins),),
        f"pip uninstall one of them, or {plugin.silence()}",
    )


def _same(left: Any, right: Any) -> bool:
    try:
        return left is right or bool(left == right)
    except Exception:  # arrays and the like, whose == has no truth value: not known to be the same
        return False


def _nearest_choice(value: Any, annotation: Any) -> str | None:
    choices = [c for c in getattr(annotation, "__args__", ()) if isinstance(c, str)]
    choices += [
        c for a in getattr(annotation, "__args__", ()) for c in getattr(a, "__args__", ()) if isinstance(c, str)
    ]
    near = closest(value, choices) if isinstance(value, str) else []
    return near[0] if near else None


def _plain(default: Any) -> str:
    return repr(dict(default)) if isinstance(default, Mapping) else repr(default)


@lru_cache(maxsize=1)
def _registry(generation: object) -> Registry:
    return Registry()


def registry() -> Registry:
    """The options of this process; rebuilt when plugins were reloaded."""
    return _registry(plugins.generation())


def resolve(given: Mapping[str, Any]) -> Settings:
    """Check what a user gave to ``ml.compile`` and fill in the defaults."""
    return registry().resolve(given)


def fitted(given: Mapping[str, Any], backends: Collection[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Split what a user gave into options for these backends, and keywords for others only."""
    return registry().fitted(given, backends)


def declared() -> list[Option]:
    """Return the options of this process."""
    return [one.option for one in registry().by_name.values()]


def rows() -> list[dict[str, Any]]:
    """All options for listings."""
    return registry().rows()
