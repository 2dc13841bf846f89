"""The session of ``ml.compile``: its parts that do not depend on the types of the inputs (steps one and two)."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any

from mithril import plugins
from mithril.backend import Backend
from mithril.compiler.deadline import Deadline
from mithril.compiler.frontend import source_of
from mithril.compiler.input_types import input_specs
from mithril.compiler.observers import Progress
from mithril.compiler.option_table import Settings
from mithril.compiler.pass_pipeline import make_pipeline, record_clashes, select_passes
from mithril.compiler.program_cache import ProgramCache
from mithril.compiler.requirements import (
    check_sizes,
    note_planning,
    note_precision,
    record_absences,
    record_providers,
)
from mithril.compiler.unused_parts import Unused, unused_of
from mithril.graph import BackendError, Decisions
from mithril.passes import PassContext, PassManager
from mithril.plugins import CompileContext, HardwareTarget


class Session:
    """Backend, options, time limit, target, source, inputs, passes and cache of one compilation."""

    def __init__(self, context: CompileContext, settings: Settings, deadline: Deadline, progress: Progress) -> None:
        self.context, self.settings, self.deadline = context, settings, deadline
        self.model: Any = context.model
        self.backend: Backend = context.backend
        self.decisions: Decisions = context.decisions
        self.target = context.target = _target(self.backend, settings, self.decisions)
        self.inference: bool = settings["inference"] or settings["static_inference"]
        self.source = source_of(self.model, outputs=settings["outputs"], inference=self.inference)
        progress.stage("flatten", None)
        self.passes = select_passes(settings, context)  # fail early on invalid names
        record_clashes(context)
        record_providers(context, self.source)
        record_absences(context)
        self.specs = input_specs(self.source, settings)
        self.unused = unused_of(self.source)
        self.unused.record(self.decisions)
        note_planning(settings, self.backend, self.decisions)
        note_precision(settings, self.backend, self.decisions)
        check_sizes(settings, self.specs)
        progress.stage("resolve", None)
        is_cached = settings["cache"] and not settings["checks"]
        self.cache = ProgramCache(context, self.source, self.passes) if is_cached else None
        if settings["cache"] and not is_cached:
            self.decisions.record("ignored", "cache=True: programs with checks are not cached")

    def note_unused(self, params: Iterable[str]) -> None:
        """Add parameters that no result of a traced graph depends on."""
        self.unused = self.unused.with_params(params)
        Unused(params=self.unused.params).record(self.decisions)

    @cached_property
    def manager(self) -> PassManager:
        """The passes of the level with the changes of user and plugins, imported for the first program."""
        return make_pipeline(self.passes, self.settings, self.context)

    def pass_context(self, *, then_gradients: bool = False, parameters_bound: bool = False) -> PassContext:
        """Return the context that passes run in."""
        return PassContext(
            backend=self.backend,
            target=self.target,
            level=self.context.level,
            options=self.settings,
            decisions=self.decisions,
            gradients_follow=then_gradients,
            parameters_bound=parameters_bound,
        )


def _target(backend: Backend, settings: Settings, decisions: Decisions) -> HardwareTarget | None:
    name = settings["target_hardware"]
    if name is None:
        return None
    target = plugins.target(name).spec
    families = backend.capabilities.families
    if target.family not in families:
        raise BackendError(
            f"target_hardware='{name}' conflicts with the backend's device",
            facts=[
                f"'{name}' belongs to the family '{target.family}'",
                f"{backend!r} runs on: {', '.join(families)}",
            ],
            hint="choose a backend and device of that family, or omit target_hardware",
        )
    if target.family == backend.capabilities.family and backend.capabilities.local:
        message = f"target_hardware='{name}': the backend compiles for its {target.family} in any case"
        decisions.record("choice", message)
    return target
