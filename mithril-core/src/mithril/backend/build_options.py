"""The options of ``ml.compile`` that backends read to build an executable, and the access to all options."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from mithril.backend.annotations import Positive
from mithril.graph import LEVELS, Decisions, Graph, OptionError
from mithril.plugins import HardwareTarget, Option, options, target

# The options of ml.compile that reach Backend.build.
BUILD_OPTIONS = (
    Option(
        "checks",
        bool,
        False,
        "Raise an error for indices out of range; without checks they are clamped to the valid range.",
    ),
    Option(
        "code_transformers",
        Sequence[Callable[[str], str]],
        (),
        "Functions (code -> code) to apply to the generated source, in order.",
        example="[lambda code: code]",
    ),
    Option(
        "file_path",
        str | os.PathLike[str] | None,
        None,
        "Write the generated source to this file; programs with gradients go to net.grad.py next to net.py.",
        affects="shown",
        example='"net.py"',
    ),
    Option(
        "jit",
        bool | None,
        None,
        "Use the backend's just-in-time compiler; None selects the backend's default.",
        example="True",
    ),
    Option(
        "jit_options",
        Mapping[str, Any],
        MappingProxyType({}),
        "Options of the backend's just-in-time compiler.",
        example='{"donate_argnums": (0,)}',
    ),
    Option(
        "memory_planning",
        bool | str | Callable[..., Any],
        True,
        "Strategy for the arena: 'smallest' (True), 'greedy', 'best_fit', 'apart' (False: no reuse of memory), "
        "'module:function', or a function.",
        ("optimizations.memory_planning",),
        example='"best_fit"',
    ),
    Option(
        "num_threads",
        Positive | None,
        None,
        "Maximum number of threads of the backend; None keeps the backend's default.",
        ("cpu_options.num_threads",),
        example="4",
    ),
    Option(
        "semantics",
        Literal["portable", "native"],
        "portable",
        "Use the same semantics on all backends, or the backend's own semantics where they are faster.",
    ),
    Option(
        "static_inference", bool, False, "Compile for inference with constant parameters, shapes and memory layout."
    ),
    Option(
        "template_path",
        str | os.PathLike[str] | None,
        None,
        "Jinja2 template for the generated source.",
        file=True,
        example='"net.py.jinja"',
    ),
)


def declared_defaults() -> dict[str, Any]:
    """Return the default of each option of ``ml.compile``."""
    return {entry.spec.name: entry.spec.default for entry in options()}


class BuildOptions:
    """The options of ``ml.compile``, as they are read to build an executable.

    ``settings`` holds all options, including those of plugins. Backends read options from it on demand, so that unread
    options can be reported as ignored. Without ``settings``, the declared defaults with ``overrides`` apply.
    """

    def __init__(
        self,
        settings: Mapping[str, Any] | None = None,
        *,
        inference: bool = False,
        decisions: Decisions | None = None,
        **overrides: Any,
    ) -> None:
        self.settings = {**declared_defaults(), **overrides} if settings is None else settings
        self.inference = inference
        self.decisions = decisions if decisions is not None else Decisions()

    @property
    def jit(self) -> bool | None:
        return self.settings["jit"]  # type: ignore[no-any-return]

    @property
    def jit_options(self) -> Mapping[str, Any]:
        return self.settings["jit_options"]  # type: ignore[no-any-return]

    @property
    def memory_plan(self) -> str | Callable[..., Any]:
        """The strategy that plans the arena: ``"smallest"`` by default, ``"apart"`` if planning is off."""
        planning = self.settings["memory_planning"]
        return {True: "smallest", False: "apart"}[planning] if isinstance(planning, bool) else planning

    @property
    def fuses(self) -> bool:
        """Whether the backend may fuse operations: at levels above "none", unless ``optimizations`` says otherwise."""
        switches = self.settings["optimizations"]
        values = [switches[name] for name in ("fusion", "operator_fusion") if name in switches]
        if values:
            return all(values)
        return self.settings["optimization_level"] != LEVELS[0] or bool(self.settings["graph_optimization"])

    @property
    def target(self) -> HardwareTarget | None:
        """The hardware of ``target_hardware``."""
        name = self.settings["target_hardware"]
        return target(name).spec if name is not None else None

    @property
    def num_threads(self) -> int | None:
        return self.settings["num_threads"]  # type: ignore[no-any-return]

    @property
    def semantics(self) -> str:
        return self.settings["semantics"]  # type: ignore[no-any-return]

    @property
    def checks(self) -> bool:
        return self.settings["checks"]  # type: ignore[no-any-return]

    @property
    def static(self) -> bool:
        return self.settings["static_inference"]  # type: ignore[no-any-return]

    @property
    def file_path(self) -> str | str | os.PathLike[str] | None:
        return self.settings["file_path"]  # type: ignore[no-any-return]

    @property
    def template_path(self) -> str | str | os.PathLike[str] | None:
        return self.settings["template_path"]  # type: ignore[no-any-return]

    @property
    def plugins(self) -> list[str]:
        """The parts of plugins that took part so far, for comments in generated code."""
        return [decision.message for decision in self.decisions.of("plugin")]

    def source_path(self, graph: Graph, gradients: bool = False) -> Path | None:
        """Return the path of a program's source, ``model.c``, or ``model.grad.c`` for a program with gradients."""
        if self.file_path is None:
            return None
        path = Path(self.file_path)
        if not gradients and not graph.results_of("gradient"):
            return path
        path = path.with_suffix(f".grad{path.suffix}")
        self.decisions.record("choice", f"file_path: wrote the program with gradients to '{path}'")
        return path

    def reject(self, backend: str, names: Sequence[str], reason: str) -> None:
        """Raise if one of the options is set, which the backend does not support."""
        for name in names:
            if self.settings[name]:
                raise OptionError(
                    f"backend '{backend}' does not support {name}=: {reason}",
                    hint=f"omit {name}=, or compile for a backend that generates Python, such as 'numpy'",
                )

    @property
    def code_transformers(self) -> Sequence[Callable[[str], str]]:
        return self.settings["code_transformers"]  # type: ignore[no-any-return]
