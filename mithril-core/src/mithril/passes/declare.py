"""A pass: a function from graph to graph, how it is declared and placed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from types import MappingProxyType
from typing import Any, overload

from mithril.base import PASS_LEVELS, STAGE_ALIASES, STAGES, Decisions, PassError, unknown
from mithril.ir import Graph, attribute_text


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
        object.__setattr__(self, "stage", STAGE_ALIASES.get(self.stage, self.stage))
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
