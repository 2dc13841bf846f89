"""The public names for plugins that write steps of this backend: ``mithril_lowerings("ggml")``."""

from __future__ import annotations

from typing import Any, Protocol

from mithril.graph import Node
from mithril_ggml.program.program_builder import ProgramBuilder
from mithril_ggml.program.strided_tensor import Tensor

__all__ = ["ProgramBuilder", "StepWriter", "Tensor"]


class StepWriter(Protocol):
    """A writer of steps: takes the operands as further arguments, and returns the tensor of each result."""

    def __call__(
        self, draft: ProgramBuilder, node: Node, *operands: Any, **none: Any
    ) -> Tensor | tuple[Tensor, ...]: ...
