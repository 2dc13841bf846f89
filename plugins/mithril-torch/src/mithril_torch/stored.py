"""The operation of barriers in programs that ``torch.compile`` compiles: inductor stores its operand and result."""

from __future__ import annotations

from typing import Any

import torch


def _copy(x: torch.Tensor) -> torch.Tensor:
    """Return a copy; inductor cannot look inside, and so does not compute the value again where it is read."""
    return x.clone()


def _gradient(context: Any, gradient: torch.Tensor) -> torch.Tensor:
    return gradient


stored = torch.library.custom_op("mithril::stored", _copy, mutates_args=())
stored.register_fake(torch.empty_like)
stored.register_autograd(_gradient)
