"""Passes: functions from graph to graph, their order, and the manager that runs, checks and times them."""

from __future__ import annotations

import inspect
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from types import MappingProxyType
from typing import Any, overload

import numpy as np

from mithril.base.decisions import Decisions
from mithril.base.dims import symbols
from mithril.base.errors import MithrilError, PassError, VerificationError, unknown
from mithril.base.levels import PASS_LEVELS, STAGES
from mithril.ir import Graph, verify
from mithril.ir.attribute_text import attribute_text, parse_attributes
from mithril.ir.verify import Snapshot

Runner = Callable[[Any, Graph, Any, Callable[..., Graph]], Graph]


@dataclass
class PassContext:
    """What a pass may know of the compilation it runs in."""

    backend: Any = None
    target: Any = None
    level: str = "medium"
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    decisions: Decisions = field(default_factory=Decisions)
    gradients_follow: bool = False  # whether the result is going to be differentiated

    def record(self, kind: str, message: str, where: object = "") -> None:
        """Note a decision made on the user's behalf."""
        self.decisions.record(kind, message, where)

    def option(self, name: str, default: Any = None) -> Any:
        """An option of ``ml.compile``, or the default where nobody declares it."""
        return self.options.get(name, default)


@dataclass(frozen=True)
class Pass:
    """A pass and how it is placed. ``run`` takes the graph, and the context where it has a second parameter."""

    name: str
    run: Callable[..., Graph]
    stage: str = "canonical"
    level: str | None = "low"
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    version: int = 1
    summary: str = ""
    exact: bool = True  # whether results stay equal bit for bit
    tolerance: float = 1e-4  # of one that is not exact: how far results may part, relative to the largest element
    keeps_interface: bool = True  # whether inputs and outputs stay as they are
    origin: str = ""  # distribution, or the user's file and line
    trusted: bool = False  # whether its own tests show that it leaves its input alone: not checked at each run
    rules: Any = None  # the RuleSet that it applies, for `mithril explain --rule`

    def __post_init__(self) -> None:
        if self.stage not in STAGES:
            what, facts, hint = unknown(f"stage of pass '{self.name}'", self.stage, STAGES)
            raise PassError(what, facts=facts, hint=hint)
        if self.level is not None and self.level not in PASS_LEVELS:
            what, facts, hint = unknown(f"level of pass '{self.name}'", str(self.level), PASS_LEVELS)
            raise PassError(what, facts=facts, hint=hint or "level=None runs the pass only where a user names it")

    def __call__(self, graph: Graph, context: PassContext | None = None) -> Graph:
        return self.run(graph, context or PassContext()) if _takes_context(self.run) else self.run(graph)

    def __str__(self) -> str:
        return pass_text(self)


def _takes_context(run: Callable[..., Any]) -> bool:
    try:
        positional = [
            p
            for p in inspect.signature(run).parameters.values()
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
            and (p.default is p.empty or isinstance(p.default, PassContext))
        ]
    except (TypeError, ValueError):
        return False
    return len(positional) >= 2


@overload
def pass_(function: Callable[..., Graph]) -> Pass: ...


@overload
def pass_(
    *,
    name: str | None = None,
    stage: str = "canonical",
    level: str | None = "low",
    before: Iterable[str] = (),
    after: Iterable[str] = (),
    version: int = 1,
    exact: bool = True,
    tolerance: float = 1e-4,
    keeps_interface: bool = True,
    rules: Any = None,
) -> Callable[[Callable[..., Graph]], Pass]: ...


def pass_(
    function: Callable[..., Graph] | None = None,
    *,
    name: str | None = None,
    stage: str = "canonical",
    level: str | None = "low",
    before: Iterable[str] = (),
    after: Iterable[str] = (),
    version: int = 1,
    exact: bool = True,
    tolerance: float = 1e-4,
    keeps_interface: bool = True,
    rules: Any = None,
) -> Any:
    """Decorator: a function ``graph -> graph`` (or ``(graph, context) -> graph``) as a pass.

    ``exact=False`` says that results may differ in the last places, or by ``tolerance`` of the largest element.
    Of a pass that a plugin installs, stage, level, before, after and version stand in its ``PassSpec`` only.
    """

    def declare(run: Callable[..., Graph]) -> Pass:
        return Pass(
            name or run.__name__.replace("_", "-"),
            run,
            stage,
            level,
            tuple(before),
            tuple(after),
            version,
            (inspect.getdoc(run) or "").split("\n")[0],
            exact,
            tolerance,
            keeps_interface,
            _place(run),
            rules=rules,
        )

    return declare if function is None else declare(function)


def _place(run: Any) -> str:
    origin = getattr(run, "origin", None)  # of rules: where their functions are written
    if isinstance(origin, str):
        return origin
    code = getattr(run, "__code__", None) or getattr(type(run).__call__, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else ""


def as_pass(given: Any, **placing: Any) -> Pass:
    """A pass from what a user gives: a pass, a function, an instance of a pass class (a frozen dataclass)."""
    if isinstance(given, Pass):
        made = given
    elif isinstance(given, type):
        made = as_pass(given())
    elif callable(given):
        name = getattr(given, "name", None) or getattr(given, "__name__", type(given).__name__)
        words = (
            "stage",
            "level",
            "before",
            "after",
            "version",
            "exact",
            "tolerance",
        )  # a rule's before and after are functions
        known = {n: getattr(given, n) for n in words if hasattr(given, n) and not callable(getattr(given, n))}
        known["keeps_interface"] = getattr(given, "keeps_interface", True)
        known["rules"] = given if hasattr(given, "rules") else None
        made = Pass(str(name).replace("_", "-"), given, origin=_place(given), **known)
    else:
        raise PassError(
            f"'{given!r}' is no pass",
            facts=["accepted: a function graph -> graph, a pass object, the name of an installed pass"],
        )
    if not placing:
        return made
    values = {f.name: placing.get(f.name, getattr(made, f.name)) for f in fields(Pass)}
    return Pass(**values)


PLACEMENT = ("stage", "level", "before", "after", "version")


def placement_of(given: Any) -> list[str]:
    """Return the words by which a pass places itself, as ``stage='fuse'``; defaults are none."""
    if isinstance(given, Pass):
        defaults = {f.name: f.default for f in fields(Pass)}
        said = {name: getattr(given, name) for name in PLACEMENT if getattr(given, name) != defaults[name]}
    else:
        said = {name: getattr(given, name) for name in PLACEMENT if hasattr(given, name)}
    return [f"{name}={value!r}" for name, value in said.items() if not callable(value)]


# -- text ---------------------------------------------------------------------------------------------------------
_ITEM = re.compile(r"\s*([\w.\-]+)\s*(?:\{([^{}]*)\})?\s*(?:,|$)")


def pass_text(one: Pass) -> str:
    """``fuse{max-nodes=8}``: the name, and the options that differ from their defaults."""
    made = one.run
    if not is_dataclass(made) or isinstance(made, type):
        return one.name
    parts = []
    for f in fields(made):
        value = getattr(made, f.name)
        if f.default is MISSING or value != f.default:
            parts.append(f"{f.name.replace('_', '-')}={attribute_text(value)}")
    return one.name + (f"{{{', '.join(parts)}}}" if parts else "")


def pipeline_text(passes: Iterable[Pass]) -> str:
    return ", ".join(map(pass_text, passes))


def parse_pipeline(text: str, lookup: Callable[[str], Any]) -> list[Pass]:
    """The passes that ``pipeline_text`` shows; ``lookup`` gives the function or class of a name."""
    out, at = [], 0
    while at < len(text):
        match = _ITEM.match(text, at)
        if not match or match.end() == at:
            raise PassError(
                f"cannot read the pipeline at '{text[at : at + 30].strip()}'", hint="it looks like a, b{option=1}, c"
            )
        made = lookup(match[1])
        if match[2]:
            options = parse_attributes(re.sub(r"([\w\-]+)=", lambda m: m[1].replace("-", "_") + "=", match[2]), {})
            try:
                made = made(**options)
            except TypeError as error:
                raise PassError(f"pass '{match[1]}' does not take these options: {error}") from None
        out.append(as_pass(made, name=match[1]))
        at = match.end()
    return out


# -- order --------------------------------------------------------------------------------------------------------
def ordered(passes: Sequence[Pass]) -> list[Pass]:
    """By stage, then so that ``before`` and ``after`` hold, else as given."""
    names = [p.name for p in passes]
    if len(set(names)) != len(names):
        twice = next(n for n in names if names.count(n) > 1)
        raise PassError(f"the pass '{twice}' is there twice", hint="give one of them another name=")
    stages = {p.name: p.stage for p in passes}
    for p in passes:
        for name in (*p.before, *p.after):
            if stages.get(name, p.stage) != p.stage:
                raise PassError(
                    f"pass '{p.name}' names '{name}' in before= or after=, which runs in stage '{stages[name]}'",
                    facts=[f"'{p.name}' runs in stage '{p.stage}'", f"stages, in order: {', '.join(STAGES)}"],
                    hint="before= and after= order passes of one stage; choose another stage= instead",
                )
    out: list[Pass] = []
    for stage in STAGES:
        out += _sorted([p for p in passes if p.stage == stage])
    return out


def _sorted(passes: list[Pass]) -> list[Pass]:
    here = {p.name: p for p in passes}
    earlier = {p.name: [n for n in p.after if n in here] for p in passes}
    for p in passes:
        for name in p.before:
            if name in here:
                earlier[name].append(p.name)
    out: list[Pass] = []
    done: set[str] = set()
    waiting = list(here)
    while waiting:
        ready = next((n for n in waiting if all(e in done for e in earlier[n])), None)
        if ready is None:
            circle = _circle(earlier, waiting)
            raise PassError(
                "passes wait for each other in a circle: " + " -> ".join(circle),
                facts=[_placing(here[name]) for name in dict.fromkeys(circle)],
                hint=f"leave one of them out: optimizations={{'{circle[0]}': False}}",
            )
        waiting.remove(ready)
        done.add(ready)
        out.append(here[ready])
    return out


def _placing(one: Pass) -> str:
    """One line for a circle: the pass, its distribution, and its placement."""
    words = [f"{field}={', '.join(getattr(one, field))}" for field in ("before", "after") if getattr(one, field)]
    return f"'{one.name}'" + (f" of {one.origin}" if one.origin else "") + f": {'; '.join(words) or 'no placement'}"


def _circle(earlier: Mapping[str, list[str]], waiting: list[str]) -> list[str]:
    path = [waiting[0]]
    while True:
        following = next(n for n in earlier[path[-1]] if n in waiting)
        if following in path:
            return [*path[path.index(following) :], following][::-1]
        path.append(following)


# -- running ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class PassRecord:
    """What one pass did."""

    name: str
    seconds: float
    before: int
    after: int
    changed: bool


@dataclass
class PipelineReport:
    """What all passes did; print it."""

    records: list[PassRecord] = field(default_factory=list)

    def __str__(self) -> str:
        if not self.records:
            return "no passes"
        width = max(len(r.name) for r in self.records)
        lines = [f"{'pass'.ljust(width)}  {'nodes':>13}  {'ms':>8}"]
        for r in self.records:
            count = f"{r.before} -> {r.after}" if r.changed else "="
            lines.append(f"{r.name.ljust(width)}  {count:>13}  {r.seconds * 1e3:8.2f}")
        return "\n".join(lines)


class PassManager:
    """Runs passes in order. After each one the graph is verified; under ``check="numeric"`` also evaluated."""

    def __init__(self, passes: Iterable[Any], *, check: str = "structure") -> None:
        self.passes = ordered([as_pass(p) for p in passes])
        self.check = check

    def __str__(self) -> str:
        return pipeline_text(self.passes)

    @property
    def names(self) -> list[str]:
        return [p.name for p in self.passes]

    def run(
        self, graph: Graph, context: PassContext | None = None, runner: Runner | None = None
    ) -> tuple[Graph, PipelineReport]:
        """The graph after all passes, and what they did. ``runner(pass, graph, context, run)`` wraps each."""
        context = context or PassContext()
        report = PipelineReport()
        for one in self.passes:
            start = time.perf_counter()
            before = graph
            graph = self.run_one(one, graph, context, runner, [r.name for r in report.records])
            elapsed = time.perf_counter() - start
            report.records.append(
                PassRecord(one.name, elapsed, len(before.nodes), len(graph.nodes), graph is not before)
            )
        return graph, report

    def run_one(
        self,
        one: Pass,
        graph: Graph,
        context: PassContext | None = None,
        runner: Runner | None = None,
        done: Sequence[str] = (),
    ) -> Graph:
        """One pass, with its result checked."""
        context = context or PassContext()

        snapshot = None if self.check == "none" or one.trusted else Snapshot(graph)

        def last(pass_: Pass, graph: Graph, context: PassContext) -> Graph:
            result = pass_(graph, context)
            _check_kind(pass_, result, done)  # before plugins that wrap the pass see it
            return result

        try:
            made = last(one, graph, context) if runner is None else runner(one, graph, context, last)
        except MithrilError as error:
            raise error.with_facts(*_who(one, done)) from None
        except Exception as error:
            raise PassError(
                f"pass '{one.name}' failed: {type(error).__name__}: {error}", facts=_who(one, done)
            ) from error
        if snapshot is not None and (difference := snapshot.difference()) is not None:
            raise PassError(
                f"pass '{one.name}' changed its input graph in place",
                facts=[difference, *_who(one, done)],
                hint="build new nodes with graph.edit() or node.replaced(...), and return the new graph",
            )
        self._check(one, graph, made, done)
        return made

    def _check(self, one: Pass, before: Graph, after: Any, done: Sequence[str]) -> None:
        _check_kind(one, after, done)
        if after is before or self.check == "none":
            return
        try:
            verify(after, since=before)
        except VerificationError as error:
            raise PassError(
                f"pass '{one.name}' made a graph that is not sound: {error.what}",
                facts=[*error.facts, *_who(one, done)],
                hint="this is a mistake of the pass, not of the model",
            ) from error
        if one.keeps_interface:
            _same_interface(one, before, after, done)
        if self.check == "numeric":
            _same_results(one, before, after, done)


def _check_kind(one: Pass, result: Any, done: Sequence[str]) -> None:
    if not isinstance(result, Graph):
        raise PassError(
            f"pass '{one.name}' returned {type(result).__name__}, expected a graph",
            facts=_who(one, done),
            hint="return the graph itself where nothing is to change",
        )


def _who(one: Pass, done: Sequence[str]) -> list[str]:
    return [
        f"pass '{one.name}' from {one.origin}" if one.origin else "",
        f"passes before: {', '.join(done)}" if done else "",
    ]


def _same_interface(one: Pass, before: Graph, after: Graph, done: Sequence[str]) -> None:
    def shape_of(graph: Graph) -> tuple[Any, ...]:
        inputs = sorted((i.name, i.role, str(i.type)) for i in graph.arguments)
        return inputs, [(n, str(v.type)) for n, v in zip(graph.output_names, graph.outputs, strict=True)]

    if shape_of(before) != shape_of(after):
        (old_in, old_out), (new_in, new_out) = shape_of(before), shape_of(after)
        gone = [r for r in (*old_in, *old_out) if r not in (*new_in, *new_out)]
        new = [r for r in (*new_in, *new_out) if r not in (*old_in, *old_out)]
        raise PassError(
            f"pass '{one.name}' changed the graph's inputs or outputs",
            facts=[f"gone: {gone[:5]}", f"new: {new[:5]}", *_who(one, done)],
            hint="declare keeps_interface=False if that is meant",
        )


ROUNDING = 0.04  # of a tolerance is that of each operation: 0.004 for mixed precision, the rounding of bfloat16
SPREADS = 3  # one sample of rounding may lie this much nearer than another


def _same_results(one: Pass, before: Graph, after: Graph, done: Sequence[str]) -> None:
    from mithril.ir.evaluate import evaluate, rounding_spread

    arguments = random_arguments(before)
    expected = evaluate(before, arguments)
    got = evaluate(after, {n: a for n, a in arguments.items() if n in {i.name for i in after.inputs}})
    spread: dict[str, float] | None = None
    for name, array in expected.items():
        other = got[name]
        if one.exact:
            same = np.array_equal(array, other, equal_nan=array.dtype.kind == "f")
        else:
            scale = float(np.max(np.abs(array.astype(np.float64)), initial=1.0)) if array.size else 1.0
            same = _close(array, other, one.tolerance, 0.1 * one.tolerance * scale)
            if not same:
                spread = spread or rounding_spread(before, arguments, ROUNDING * one.tolerance)
                same = _close(array, other, one.tolerance, 0.1 * one.tolerance * scale + SPREADS * spread[name])
        if not same:
            difference = np.max(np.abs(array.astype(np.float64) - other.astype(np.float64)), initial=0.0)
            raise PassError(
                f"pass '{one.name}' changes the value of output '{name}'",
                facts=[f"largest difference {difference:.3g}", "on random inputs", *_who(one, done)],
                hint="declare exact=False if the last places may change; otherwise the pass is wrong",
            )


def _close(array: Any, other: Any, relative: float, absolute: float) -> bool:
    pair = array.astype(np.float64), other.astype(np.float64)
    return np.allclose(*pair, rtol=relative, atol=absolute, equal_nan=True)


def random_arguments(graph: Graph, seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    """Random arrays for a graph's inputs; symbolic sizes get small values within their bounds."""
    from mithril.base.dims import substitute

    rng = np.random.default_rng(seed)
    sizes = {}
    for k, s in enumerate(symbols(*(d for i in graph.inputs for d in i.type.shape))):
        sizes[s.name] = min(max(s.low, 2 + k), s.high if s.high is not None else 2 + k)
    out = {}
    for i in graph.arguments:
        shape = tuple(int(substitute(d, sizes)) for d in i.type.shape)
        kind = i.type.dtype
        if kind.is_float:
            out[i.name] = rng.uniform(-1, 1, shape).astype(kind.numpy)
        elif kind.is_bool:
            out[i.name] = rng.random(shape) < 0.5
        else:
            out[i.name] = rng.integers(0, 3, shape).astype(kind.numpy)
    return out
