"""The interface of compiled models for reports, captures and file formats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from mithril.backend import Backend
from mithril.ir import Graph
from mithril.runtime.program import Program


class Compiled(Protocol):
    """A compiled model: ``mithril.runtime.compiled_model.CompiledModel``."""

    name: str
    backend: Backend
    options: Mapping[str, Any]

    @property
    def interface(self) -> Graph: ...
    @property
    def params(self) -> dict[str, Any] | None: ...
    @property
    def held_params(self) -> Mapping[str, Any]: ...
    @property
    def programs(self) -> tuple[Program, ...]: ...
    @property
    def last_shapes(self) -> dict[str, tuple[int, ...]]: ...
    def get_shapes(self) -> dict[str, list[Any]]: ...
    def program_for(self, gradients: bool, /) -> Program | None: ...
    def concrete(self, program: Program, shapes: Mapping[str, tuple[int, ...]], /) -> Graph: ...
    def bound_call(
        self, params: Any, inputs: Any, /, *, state: Any = None, training: bool = False
    ) -> tuple[Program, dict[str, Any]]: ...
