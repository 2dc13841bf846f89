"""Lowerings of composites to MLX kernels with the semantics of the operation.

Rotary embeddings are decomposed: MLX's kernel computes the angles from a base, while the operation takes them as an
operand. Sigmoid and similar functions are decomposed too: their kernels are slower on the CPU than exp, and compiled
Metal code fuses either form.
"""

from __future__ import annotations

from typing import Any

from mithril.backend import Call, dtype_of, is_half
from mithril.graph import Node
from mithril_mlx import helpers
from mithril_mlx.lowering import table


def is_float(node: Node) -> bool:
    return bool(dtype_of(node).is_float)


def _last(node: Node) -> bool:
    """Whether the operand is floating-point and only its last axis, which is not empty, is reduced."""
    operand = node.operands[0]
    assert operand is not None
    axis = node.attributes.get("axis", node.attributes.get("axes"))
    last = (operand.type.rank - 1,)
    return operand.dtype.is_float and (axis == last or (axis,) == last)


def _operands(call: Call, *names: str) -> str:
    op = call.node.op
    operands = dict(zip(op.operands, call.node.operands, strict=True))
    return ", ".join("None" if operands[name] is None else call.array(name) for name in names)


def _biased(node: Node) -> bool:
    """Lower ``linear`` to one kernel: with a separate bias addition MLX takes up to 1.7 times as long on a CPU."""
    x, bias = node.operands[0], node.operands[2]
    assert x is not None
    plain = node.attributes["activation"] in ("none", "relu")
    return plain and bias is not None and x.dtype.name == "float32" and x.type.rank >= 2


@table.function("linear", when=_biased)
def _linear(call: Call) -> str:
    expression = f"mx.addmm({call.array('b')}, {call.array('x')}, {call.array('w')}.T)"
    return f"mx.maximum({expression}, 0.0)" if call.activation == "relu" else expression


@table.function("softmax", when=is_float)
def _softmax(call: Call) -> str:
    precise = ", precise=True" if is_half(call.node) else ""
    return f"mx.softmax({call.array('x')}, {call.axis}{precise})"


@table.function("layer_norm", when=_last)
def _layer_norm(call: Call) -> str:
    return f"mx.fast.layer_norm({_operands(call, 'x', 'scale', 'bias')}, {call.literal(call.eps)})"


@table.function("rms_norm", when=_last)
def _rms_norm(call: Call) -> str:
    return f"mx.fast.rms_norm({_operands(call, 'x', 'scale')}, {call.literal(call.eps)})"


@table.function("attention", when=is_float)
def _attention(call: Call) -> str:
    if call.node.tags.get("cached"):
        scale = call.literal(call.scale if call.scale is not None else float(call.operand_type("q").shape[3]) ** -0.5)
        return f"{call.helper(helpers.cached_attention)}({_operands(call, 'q', 'k', 'v', 'mask')}, {scale})"
    expression, mask = attention(call), call.node.operands[3]
    blind = mask is not None or (call.causal and not _every_query_sees_a_key(call))
    if not blind:
        return expression
    n, m = (call.literal(call.operand_type(name).shape[2]) for name in ("q", "k"))
    masked = "None" if mask is None else call.array("mask")
    return f"{call.helper(helpers.nan_where_fully_masked)}({expression}, {masked}, {call.causal}, {n}, {m})"


def attention(call: Call) -> str:
    """Return MLX's attention with MLX's own semantics."""
    size = call.operand_type("q").shape[3]
    scale = call.literal(call.scale) if call.scale is not None else f"{call.literal(size)} ** -0.5"
    argument = _mask(call, call.node.operands[3])
    return f"mx.fast.scaled_dot_product_attention({_operands(call, 'q', 'k', 'v')}, scale={scale}{argument})"


def _every_query_sees_a_key(call: Call) -> bool:
    """Whether a causal mask alone leaves at least one key for every query."""
    n, m = (call.operand_type(name).shape[2] for name in ("q", "k"))
    return n == m or (isinstance(n, int) and isinstance(m, int) and n <= m)


def _mask(call: Call, mask: Any) -> str:
    """Combine the mask operand and the causal mask into the one argument that MLX accepts."""
    if mask is None:
        return ', mask="causal"' if call.causal else ""
    argument = call.array("mask")
    if not mask.dtype.is_bool and mask.dtype is not call.type.dtype:
        argument = f"{argument}.astype({call.dtype()})"
    if not call.causal:
        return f", mask={argument}"
    n, m = (call.literal(call.operand_type(name).shape[2]) for name in ("q", "k"))
    return f", mask={call.helper(helpers.with_causal)}({argument}, {n}, {m})"
