"""Softmax and normalizations over the last axis: single nodes of ggml."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mithril.graph import Node
from mithril_ggml.library.library import ggml
from mithril_ggml.lowering.elementwise import arithmetic
from mithril_ggml.lowering.table import is_single, row
from mithril_ggml.program.program_builder import ProgramBuilder
from mithril_ggml.program.strided_tensor import Tensor


def _over_last(attribute: str) -> Callable[[Node], bool]:
    """Whether the attribute names the last axis only."""

    def when(node: Node) -> bool:
        x = node.operands[0]
        assert x is not None
        axis = node.attributes[attribute]
        return is_single(node) and len(x.shape) > 0 and axis in (len(x.shape) - 1, (len(x.shape) - 1,))

    return when


def by_rows(draft: ProgramBuilder, name: str, function: Callable[..., Any], x: Tensor) -> Tensor:
    """Apply a ggml function to each row."""
    source = draft.dense(x)
    out = draft.new(x.shape)
    flat = (x.size // x.shape[-1], x.shape[-1])
    rows, target = source.reshaped(flat), out.reshaped(flat)
    assert rows is not None
    assert target is not None
    draft.ggml(name, function, [rows], target, [rows])
    return out


@row("softmax", when=_over_last("axis"))
def _softmax(draft: ProgramBuilder, node: Node, x: Tensor) -> Tensor:
    return by_rows(draft, "soft_max", ggml.ggml_soft_max, x)


@row("layer_norm", when=_over_last("axes"))
def _layer_norm(draft: ProgramBuilder, node: Node, x: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
    eps = float(node.attributes["eps"])
    y = by_rows(draft, "norm", lambda ctx, a: ggml.ggml_norm(ctx, a, eps), x)
    return _affine(draft, y, scale, bias)


@row("rms_norm", when=_over_last("axis"))
def _rms_norm(draft: ProgramBuilder, node: Node, x: Tensor, scale: Tensor | None) -> Tensor:
    eps = float(node.attributes["eps"])
    y = by_rows(draft, "rms_norm", lambda ctx, a: ggml.ggml_rms_norm(ctx, a, eps), x)
    return _affine(draft, y, scale, None)


def _affine(draft: ProgramBuilder, y: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
    for name, p in (("mul", scale), ("add", bias)):
        if p is not None:
            y = combined(draft, name, y, p)
    return y


def combined(draft: ProgramBuilder, name: str, a: Tensor, b: Tensor) -> Tensor:
    """Add or multiply an operand that broadcasts to the first one."""
    result = arithmetic(draft, name, a, b, a.shape)
    if result is None:
        import numpy as np

        result = draft.new(a.shape)
        draft.numpy(name, np.add if name == "add" else np.multiply, [a, b], [result], [a])
    return result
