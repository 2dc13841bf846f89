"""Passes: functions from graph to graph, with their declaration and placement."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, TypedDict, Unpack, overload

from mithril.graph import PASS_LEVELS, STAGES, Decisions, Graph, PassError, attribute_text, unknown


@dataclass
class PassContext:
    """The compilation that a pass runs in."""

    backend: Any = None
    target: Any = None
    level: str = ""  # none outside of a compilation
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    decisions: Decisions = field(default_factory=Decisions)
    gradients_follow: bool = False  # whether the result will be differentiated
    parameters_bound: bool = False  # whether expressions of parameters are computed once, not in each call

    def record(self, kind: str, message: str, where: object = "") -> None:
        """Record a decision."""
        self.decisions.record(kind, message, where)

    def option(self, name: str) -> Any:
        """Return an option of ``ml.compile``, or None if no plugin declares it."""
        return self.options.get(name)


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
    exact: bool = True  # whether results are bit-identical
    tolerance: float = 1e-4  # allowed difference if not exact, relative to the largest element
    keeps_interface: bool = True  # whether inputs and outputs are unchanged
    origin: str = ""  # distribution, or the user's file and line
    trusted: bool = False  # tests prove that the pass does not mutate its input: skip the check at each run
    rules: Any = None  # the RuleSet of the pass, for `mithril explain --rule`

    def __post_init__(self) -> None:
        if self.stage not in STAGES:
            message, facts, hint = unknown(f"stage of pass '{self.name}'", self.stage, STAGES)
            raise PassError(message, facts=facts, hint=hint)
        if self.level is not None and self.level not in PASS_LEVELS:
            message, facts, hint = unknown(f"level of pass '{self.name}'", str(self.level), PASS_LEVELS)
            raise PassError(message, facts=facts, hint=hint or "use level=None for a pass that runs only on request")

    def __call__(self, graph: Graph, context: PassContext | None = None) -> Graph:
        return self.run(graph, context or PassContext()) if self._takes_context else self.run(graph)

    @cached_property
    def _takes_context(self) -> bool:
        return _takes_context(self.run)

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


class PassFacts(TypedDict, total=False):
    """The fields of ``Pass`` that ``@pass_`` accepts."""

    name: str | None
    stage: str
    level: str | None
    before: Iterable[str]
    after: Iterable[str]
    version: int
    exact: bool
    tolerance: float
    keeps_interface: bool
    rules: Any


@overload
def pass_(function: Callable[..., Graph]) -> Pass: ...


@overload
def pass_(**facts: Unpack[PassFacts]) -> Callable[[Callable[..., Graph]], Pass]: ...


def pass_(function: Callable[..., Graph] | None = None, **facts: Unpack[PassFacts]) -> Any:
    """Turn a function ``graph -> graph`` (or ``(graph, context) -> graph``) into a pass.

    ``exact=False`` allows rounding differences of up to ``tolerance`` times the largest element.
    For an installed pass, set stage, level, before, after and version in its ``PassSpec`` only.
    """

    def declare(run: Callable[..., Graph]) -> Pass:
        values: dict[str, Any] = {"summary": (inspect.getdoc(run) or "").split("\n")[0], "origin": _place(run), **facts}
        name = values.pop("name", None) or run.__name__.replace("_", "-")
        return Pass(name, run, **values)

    return declare if function is None else declare(function)


def _place(run: Any) -> str:
    origin = getattr(run, "origin", None)  # for rules: the location of their functions
    if isinstance(origin, str):
        return origin
    code = getattr(run, "__code__", None) or getattr(type(run).__call__, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else ""


def as_pass(value: Any, **placing: Any) -> Pass:
    """Return `value` as a pass: a pass, a function, or a pass class (a frozen dataclass) or its instance."""
    if isinstance(value, Pass):
        result = value
    elif isinstance(value, type):
        result = as_pass(value())
    elif callable(value):
        name = getattr(value, "name", None) or getattr(value, "__name__", type(value).__name__)
        words = (*PLACEMENT, "exact", "tolerance")
        # `before` and `after` of a rewrite rule are functions, not placement
        settings = {n: getattr(value, n) for n in words if hasattr(value, n) and not callable(getattr(value, n))}
        settings["keeps_interface"] = getattr(value, "keeps_interface", True)
        settings["rules"] = value if hasattr(value, "rules") else None
        result = Pass(str(name).replace("_", "-"), value, origin=_place(value), **settings)
    else:
        raise PassError(
            f"'{value!r}' is not a pass",
            facts=["accepted: a function graph -> graph, a pass object, the name of an installed pass"],
        )
    if not placing:
        return result
    values = {f.name: placing.get(f.name, getattr(result, f.name)) for f in fields(Pass)}
    return Pass(**values)


PLACEMENT = ("stage", "level", "before", "after", "version")


def placement_of(one: Any) -> list[str]:
    """Return the placement settings of a pass that differ from the defaults, such as ``stage='fuse'``."""
    if isinstance(one, Pass):
        defaults = {f.name: f.default for f in fields(Pass)}
        settings = {name: getattr(one, name) for name in PLACEMENT if getattr(one, name) != defaults[name]}
    else:
        settings = {name: getattr(one, name) for name in PLACEMENT if hasattr(one, name)}
    return [f"{name}={value!r}" for name, value in settings.items() if not callable(value)]


def pass_text(one: Pass) -> str:
    """Return the name and the options that differ from their defaults: ``fuse{max-nodes=8}``."""
    implementation = one.run
    if not is_dataclass(implementation) or isinstance(implementation, type):
        return one.name
    parts = []
    for f in fields(implementation):
        value = getattr(implementation, f.name)
        if f.default is MISSING or value != f.default:
            parts.append(f"{f.name.replace('_', '-')}={attribute_text(value)}")
    return one.name + (f"{{{', '.join(parts)}}}" if parts else "")
