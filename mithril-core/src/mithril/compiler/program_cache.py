"""On-disk cache of compiled programs (``cache=True``), keyed by all inputs of the compilation.

The key covers the model layer by layer, input types, options, passes with versions, plugins, libraries, the files of
the packages involved, and templates. An entry holds graphs and generated source as text, machine code, names and
decisions, signed with the user's key (system/disk_cache.py). Nothing is unpickled.

The user's lines are not in the key. If they moved, graphs of the entry, whose nodes name them, are compiled again where
they are read, and an entry whose other parts name them is not used.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mithril import plugins
from mithril.backend import BuildOptions, EncodedWeight, ExactSizesRequired, LazyGraph, template_texts, third_parties
from mithril.compiler.bound_checks import KINDS
from mithril.compiler.frontend import Source
from mithril.compiler.index_checks import IndexCheckedExecutable
from mithril.compiler.option_table import declared_options
from mithril.compiler.pass_pipeline import installed
from mithril.compiler.plugin_records import differences, inventory, manifest
from mithril.compiler.program import Interface, Program, ProgramKey, Results
from mithril.graph import (
    Decision,
    Graph,
    MithrilError,
    TensorType,
    __version__,
    dtype as as_dtype,
    parse,
    parse_dim,
    symbols,
    to_text,
)
from mithril.passes import PassRecord, PipelineReport
from mithril.system import ArrayCache, Store, UnhashableObject, fingerprint, package_version_key

if TYPE_CHECKING:
    from mithril.plugins import CompileContext

PREFIX = "executable/"
ARRAYS = PREFIX + "constants"  # the part that is mapped
Graphs = tuple[Callable[[], Graph], Callable[[], Graph], Callable[[], Graph]]  # traced, optimized, lowered


class ProgramCache:
    """The cached programs of one compiled model."""

    def __init__(self, context: CompileContext, source: Source, passes: Sequence[Any]) -> None:
        options = context.options
        self.context = context
        self.backend: Any = context.backend
        self.decisions = context.decisions
        self.store = Store(options["cache_dir"])
        self.declared = declared_options()
        self.reads = not any(options[option.name] for option in self.declared if option.needs_steps)
        self._environment = self._fingerprint(source, passes)
        self._model = source, passes
        self.places: Sequence[str] = getattr(source, "places", ())
        self._options = BuildOptions(options, inference=source.inference, decisions=self.decisions)

    def _fingerprint(self, source: Source, passes: Sequence[Any]) -> str | None:
        settings: Any = self.context.options
        values = settings.as_dict()
        relevant = {option.name: values[option.name] for option in self.declared if option.affects == "program"}
        name = self.backend.name
        try:
            self._model_key = fingerprint(
                source,
                relevant,
                self._input_files(),
                type(self.backend),
                self.backend.identity(),
                self.context.target,
                self.context.level,
            )
            return fingerprint([_pass_key(one) for one in passes], _environment_key(name), inventory(name))
        except UnhashableObject as what:
            self.decisions.record("ignored", f"cache: {what} has no fingerprint, so programs are not cached")
            return None

    def refresh(self) -> None:
        """Take the fingerprint of the model again, after it has learned sizes."""
        if self._environment is not None:
            self._environment = self._fingerprint(*self._model)

    def _input_files(self) -> list[Any]:
        """Return the contents of files that options read, so that an edited file changes the key."""
        options = self.context.options
        paths = [options[option.name] for option in self.declared if option.file]
        contents = [Path(path).read_bytes() for path in paths if path is not None]
        path = options["template_path"]
        texts = template_texts(path) if path is not None else {}
        if texts is None:
            raise UnhashableObject(f"the template '{path}', which includes templates with computed names,")
        return [contents, texts]

    def key(self, request: ProgramKey) -> str | None:
        """Return the cache key of a program, or None if it cannot be cached."""
        if self._environment is None:
            return None
        kind = request.kind
        types = [(name, t) for name, t in request.types]
        constants = dict(request.constants) if request.bound is None else ("folds", *sorted(request.bound.statistics))
        program = fingerprint(self._model_key, types, kind.training, kind.of, kind.wrt, constants, request.stored)
        return f"{program}-{self._environment[:32]}"

    def _note_plugins(self, key: str) -> None:
        """Record which plugins differ from those that the same program was compiled with last."""
        earlier = self.store.latest(key.partition("-")[0], ARRAYS) or {}
        if "plugins" in earlier and (changes := differences(bytes(earlier["plugins"]).decode(), self.backend.name)):
            self.decisions.record("choice", f"cache: compiled again, as plugins differ: {'; '.join(changes)}")

    def load(self, request: ProgramKey, graphs: Graphs) -> Program | None:
        """Return the cached program, or None; ``graphs`` compile those again that the entry does not contain."""
        key = self.key(request) if self.reads else None
        parts = self.store.get(key, ARRAYS) if key is not None else None
        if parts is None:
            if key is not None:
                self._note_plugins(key)
            return None
        if "exact" in parts:
            raise ExactSizesRequired(bytes(parts["exact"]).decode())
        try:
            return self._read(parts, request, graphs)
        except (MithrilError, ValueError, KeyError, TypeError, EOFError) as error:
            self.decisions.record("choice", f"cache: recompiled, as the entry cannot be read ({error})")
            return None

    def save(self, program: Program, decisions: Sequence[Decision]) -> None:
        """Save a program, if its backend supports it."""
        key = self.key(program.request)
        executable = self.backend.dump(program.executable) if key is not None else None
        if key is None or executable is None:
            if key is not None:
                self.decisions.record("ignored", f"cache: backend '{self.backend.name}' cannot save this program")
            return
        report: PipelineReport | None = program.report
        interface = program.interface
        description: dict[str, Any] = {
            "results": asdict(program.results),
            "bounds": [[type(b).__name__, *astuple(b)] for b in (program.checked.checks if program.checked else ())],
            "params": _rows(interface.params),
            "states": _rows(interface.states),
            "outputs": _rows(interface.outputs),
            "donated": interface.donated,
            "limits": [[s.name, s.low, s.high] for s in symbols(*(d for t in interface.all() for d in t.shape))],
            "decisions": [[d.kind, d.message, d.where] for d in decisions],
            "report": [[r.name, r.seconds, r.before, r.after, r.changed] for r in (report.records if report else [])],
        }
        inputs = program.traced.with_role("input", "cotangent")
        description["places"] = fingerprint(self.places)
        description["quotes"] = _quotes(self.places, [json.dumps(description).encode(), *executable.values()])
        guards = Graph(inputs, (), (), "guards", program.traced.guards)
        binary = {PREFIX + name: data for name, data in executable.items()}
        parts = {
            **({ARRAYS: binary[ARRAYS]} if ARRAYS in binary else {}),  # the first part can be mapped
            **binary,
            "plugins": manifest(inventory(self.backend.name), self.backend.name).encode(),
            "about": json.dumps(description).encode(),
            "guards": to_text(guards, origins=False).encode(),
            **{name: to_text(graph).encode() for name, graph in self._graphs(program).items()},
            **{f"early{k}": to_text(graph.get()).encode() for k, graph in enumerate(program.folded)},
        }
        self.store.put(key, parts)
        # This process reads its constants from the entry as well, so that all processes share one copy
        # (447ac243).
        if parts.get(ARRAYS):
            del executable, binary, parts
            stored = self.store.get(key, ARRAYS)
            if stored is not None:
                self.backend.adopt(program.executable, stored[ARRAYS])
                ArrayCache.forget(
                    part
                    for x in program.request.constants.values()
                    for part in (x.parts.values() if isinstance(x, EncodedWeight) else (x,))
                )

    def read_folds(self, key: str) -> bool | None:
        """Return whether a program computes expressions of parameters in advance, None if that is not stored."""
        parts = self.store.get(fingerprint(key, "folds")) if self.reads else None
        return None if parts is None else bool(json.loads(parts["about"]))

    def save_folds(self, key: str, folds: bool) -> None:
        """Store whether a program computes expressions of parameters in advance."""
        self.store.put(fingerprint(key, "folds"), {"about": json.dumps(folds).encode()})

    def _graphs(self, program: Program) -> dict[str, Graph]:
        """Return the graphs to save; of those with embedded weights only the one that restores an executable."""
        if not program.request.embeds:
            return {"traced": program.traced, "graph": program.graph, "lowered": program.executable.graph}
        # The texts of all graphs repeat the weights: 534 MB for ResNet-50, which took 3 s to read
        # (9d1a032b).
        return {} if self.backend.capabilities.keeps == "binary" else {"lowered": program.executable.graph}

    def _read(self, parts: Mapping[str, Any], request: ProgramKey, graphs: Graphs) -> Program:
        description = json.loads(parts["about"])
        has_moved = description["places"] != fingerprint(self.places)
        # Weights of a binding are stored as the graph of the program says, which compiling it again would not know.
        if has_moved and (description["quotes"] or request.bound is not None):
            raise ValueError("its messages or its graph name lines that moved")
        limits = {name: (low, high) for name, low, high in description["limits"]}
        interface = Interface(
            _types(description["params"], limits),
            _types(description["states"], limits),
            _types(description["outputs"], limits),
            parse(parts["guards"].decode()).guards,
            tuple(description["donated"]),
        )
        before, after, lowered = (
            LazyGraph(parts[name].decode() if name in parts and not has_moved else compile_again)
            for name, compile_again in zip(("traced", "graph", "lowered"), graphs, strict=True)
        )
        executable = self.backend.revive(
            {name.removeprefix(PREFIX): data for name, data in parts.items() if name.startswith(PREFIX)},
            lowered,
            self._options,
        )
        if request.embeds and "lowered" in parts and hasattr(executable, "release"):
            # The executable has copies of the weights that the graph contains.
            executable.release(graphs[-1])
        for kind, message, location in description["decisions"]:
            self.decisions.record(kind, message, location)
        results = _results(description["results"])
        report = PipelineReport([PassRecord(*row) for row in description["report"]])
        program = Program(request, before, after, interface, executable, results, report, backend=self.backend)
        if request.bound is not None:
            program.folded = tuple(LazyGraph(data.decode()) for name, data in parts.items() if name.startswith("early"))
            program.pack = partial(self.backend.packed_weights, executable, self._options)
        if bounds := [KINDS[kind](*fields) for kind, *fields in description["bounds"]]:
            program.checked = IndexCheckedExecutable(executable, bounds, program.types, self.backend)
        return program


@contextlib.contextmanager
def exact_sizes_saved(cache: ProgramCache | None, request: ProgramKey) -> Iterator[None]:
    """Save that the backend has no program for these symbolic sizes, since it takes a compilation to notice.

    A refusal that another error caused is not saved: that error may be of this machine at this time.
    """
    try:
        yield
    except ExactSizesRequired as reason:
        key = cache.key(request) if cache is not None else None
        if cache is not None and key is not None and reason.__cause__ is None:
            cache.store.put(key, {"exact": reason.what.encode()})
        raise


def lowered_once(cache: ProgramCache | None, request: ProgramKey, lower: Callable[[ProgramKey], Graph]) -> None:
    """Raise the errors of a program that is compiled later, with parameters, unless an earlier process found none."""
    key = cache.key(request) if cache is not None else None
    if cache is None or key is None:
        lower(request)
        return
    key = fingerprint(key, "lowered")
    places = fingerprint(cache.places)
    parts = cache.store.get(key) if cache.reads else None
    earlier = json.loads(parts["about"]) if parts is not None else {}
    # Decisions name lines of the user, which may have moved.
    if earlier.get("places") == places:
        for kind, message, location in earlier["decisions"]:
            cache.decisions.record(kind, message, location)
        return
    num_decisions = len(cache.decisions)
    lower(request)
    decisions = [[d.kind, d.message, d.where] for d in list(cache.decisions)[num_decisions:]]
    cache.store.put(key, {"about": json.dumps({"places": places, "decisions": decisions}).encode()})


def _quotes(places: Sequence[str], parts: Sequence[bytes]) -> bool:
    """Whether parts of an entry name lines of the files of the user."""
    files = {file.encode() for place in places if (file := re.sub(r"^.* at |:\d+$", "", place))}
    return any(file + b":" in part for file in files for part in parts)


def _results(description: Mapping[str, Any]) -> Results:
    pairs = {role: tuple((target, name) for target, name in description[role]) for role in ("gradients", "states")}
    return Results(tuple(description["outputs"]), **pairs)


def _rows(types: Mapping[str, TensorType]) -> list[list[Any]]:
    return [[name, t.dtype.name, [d if isinstance(d, int) else str(d) for d in t.shape]] for name, t in types.items()]


def _types(rows: Sequence[Any], limits: Mapping[str, tuple[int, int | None]]) -> dict[str, TensorType]:
    """Parse types from names and sizes; strings are dims."""
    return {
        name: TensorType(as_dtype(kind), tuple(d if isinstance(d, int) else parse_dim(d, limits) for d in shape))
        for name, kind, shape in rows
    }


def _pass_key(one: Any) -> Any:
    """Return the name of a pass of this project, and the code of any other pass."""
    # A plugin of one file has no package whose version is in the key (df4d1dfa).
    if isinstance(one, str) and not plugins.pass_spec(one).plugin.first_party:
        return installed(one)
    return one


def _environment_key(backend: str) -> list[str]:
    """Return the installed versions that affect compiled programs."""
    versions = [f"python {sys.version}", f"mithril {__version__} {package_version_key('mithril')}"]
    packages = {plugin.module.partition(".")[0] for plugin in plugins.found() if plugin.version}
    packages |= third_parties().keys()
    offers = [offer for offers in plugins.lowerings(backend).values() for offer in offers]
    packages |= {offer.spec.loads.partition(":")[0].partition(".")[0] for offer in offers}
    versions += [f"{package} {package_version_key(package)}" for package in sorted(packages)]
    entry = plugins.backends().get(backend)
    versions += _versions("mithril-core")
    return versions + (_versions(entry.plugin.distribution) if entry is not None else [])


def _versions(distribution: str) -> list[str]:
    """Return the installed versions of a distribution's dependencies from metadata, without imports."""
    try:
        requirements = metadata.requires(distribution) or []
    # Imported from a path, without being installed.
    except metadata.PackageNotFoundError:
        return []
    names = sorted({re.split(r"[^\w.-]", text, maxsplit=1)[0] for text in requirements if "extra ==" not in text})
    versions = []
    for name in names:
        # A requirement of an extra or of another platform.
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions.append(f"{name} {metadata.version(name)}")
    return versions
